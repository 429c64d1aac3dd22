"""Ling 3 (Bailing): Kimi Delta Attention, gated latent attention, experts in groups.

    source   conversion/bailingmoe3.py and src/models/bailingmoe3.cpp of llama.cpp

The gates of a delta layer are computed from hidden at once; the file has them under the first of
the two names that Kimi Linear has for its pairs. Decays are exp(A_log), and Kimi's are negated.
"""

from __future__ import annotations

from ferryman.gguf.architectures.config_fields import Fields, by_layer, rope_fields, trunk_fields
from ferryman.gguf.architectures.experts.grouped import GROUPED_EXPERTS, grouped_fields, mlp_kinds
from ferryman.gguf.architectures.experts.latent import HALVES, LATENT, latent_sizes
from ferryman.gguf.architectures.tensor_names import ENDS, NORMS, TensorNames
from ferryman.gguf.model_file import GgufFile

_DELTA = {
    **{f"ssm_conv1d_{part}.weight": f"attention.{part}_conv1d.weight" for part in "qkv"},
    **{f"ssm_{gate}_a.weight": f"attention.{gate}_proj.weight" for gate in "fg"},
    **{f"attn_{part}.weight": f"attention.{part}_proj.weight" for part in "kv"},
    "ssm_beta.weight": "attention.b_proj.weight",
    "ssm_a": "attention.A_log",
    "ssm_dt.bias": "attention.dt_bias",
    "ssm_norm.weight": "attention.o_norm.weight",
}
_LIMITS = ("{arch}.swiglu_clamp_exp", "{arch}.swiglu_clamp_shexp")


def bailing_hybrid_names(model: GgufFile) -> TensorNames:
    latent = {
        there: here.replace("self_attn.", "attention.").replace("o_proj", "dense")
        for there, here in LATENT.items()
    }
    layer = {
        **NORMS,
        **latent,
        "attn_gate.weight": "attention.g_proj.weight",
        **_DELTA,
        **GROUPED_EXPERTS,
        "exp_probs_b.bias": "mlp.gate.expert_bias",
    }
    return TensorNames(
        {**ENDS, "token_embd.weight": "model.word_embeddings.weight"},
        layer,
        joined_heads={
            pair: here.replace("self_attn.", "attention.") for pair, here in HALVES.items()
        },
        vectors=("attention.A_log",),
        exponents=("attention.A_log",),
        convolutions=tuple(f"attention.{part}_conv1d.weight" for part in "qkv"),
    )


def bailing_hybrid_fields(model: GgufFile) -> Fields:
    """A layer without key heads is one of Kimi Delta Attention. Gates with limits are refused."""
    metadata, experts = model.metadata, grouped_fields(model)
    for key in _LIMITS:
        if metadata.has(key) and any(metadata.numbers(key)):
            raise metadata.refusal(key, "left out, or 0 in all layers: there is no limit")
    kv_heads = by_layer(model, "{arch}.attention.head_count_kv")
    return {
        "architectures": ["BailingMoeV3ForCausalLM"],
        **trunk_fields(model),
        **latent_sizes(model),
        "q_lora_rank": metadata.whole("{arch}.attention.q_lora_rank", 0) or None,
        **rope_fields(model, metadata.whole("{arch}.rope.dimension_count")),
        **experts,
        "num_experts": experts["n_routed_experts"],
        "num_shared_experts": experts["n_shared_experts"],
        "mlp_layer_types": mlp_kinds(model),
        "layer_types": ["full_attention" if heads else "linear_attention" for heads in kv_heads],
        "head_dim": metadata.whole("{arch}.kda.head_dim"),
        "short_conv_kernel_size": metadata.whole("{arch}.ssm.conv_kernel"),
        "kda_safe_gate": metadata.flag("{arch}.kda.safe_gate", True),
        "kda_lower_bound": metadata.number("{arch}.kda.gate_lower_bound"),
    }
