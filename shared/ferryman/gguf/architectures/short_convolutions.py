"""LFM2, dense or with experts: short convolutions, attention in some layers."""

from __future__ import annotations

from ferryman.gguf.architectures.config_fields import (
    Fields,
    any_has,
    attention_fields,
    by_layer,
    expert_fields,
    inner_dim,
    trunk_fields,
)
from ferryman.gguf.architectures.tensor_names import ENDS, TensorNames
from ferryman.gguf.model_file import GgufFile

_FINAL_NORM = "model.embedding_norm.weight"
_ENDS = {**ENDS, "output_norm.weight": _FINAL_NORM, "token_embd_norm.weight": _FINAL_NORM}
_MATRICES = {"gate": "w1", "up": "w3", "down": "w2"}
_LAYER = {
    "attn_norm.weight": "operator_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.out_proj.weight",
    "attn_q_norm.weight": "self_attn.q_layernorm.weight",
    "attn_k_norm.weight": "self_attn.k_layernorm.weight",
    **{
        f"shortconv.{name}.{part}": f"conv.{name}.{part}"
        for name in ("conv", "in_proj", "out_proj")
        for part in ("weight", "bias")
    },
    **{f"ffn_{there}.weight": f"feed_forward.{here}.weight" for there, here in _MATRICES.items()},
    **{
        f"ffn_{there}_exps.weight": f"feed_forward.experts.{{}}.{here}.weight"
        for there, here in _MATRICES.items()
    },
    "ffn_gate_inp.weight": "feed_forward.gate.weight",
    "exp_probs_b.bias": "feed_forward.expert_bias",
}


def lfm2_names(model: GgufFile) -> TensorNames:
    return TensorNames(_ENDS, _LAYER, convolutions=("conv.conv.weight",))


def lfm2_fields(model: GgufFile) -> Fields:
    """A layer without key heads has a convolution; the width of MLPs is adjusted already."""
    return {"architectures": ["Lfm2ForCausalLM"], **_fields(model)}


def lfm2_moe_fields(model: GgufFile) -> Fields:
    """The shares of a token's experts sum to 1, as llama.cpp computes them."""
    metadata = model.metadata
    return {
        "architectures": ["Lfm2MoeForCausalLM"],
        **_fields(model),
        **expert_fields(model),
        "moe_intermediate_size": metadata.whole("{arch}.expert_feed_forward_length"),
        "num_dense_layers": metadata.whole("{arch}.leading_dense_block_count", 0),
        "use_expert_bias": any_has(model, "exp_probs_b.bias"),
        "norm_topk_prob": True,
        "routed_scaling_factor": metadata.number("{arch}.expert_weights_scale", 1.0) or 1.0,
    }


def _fields(model: GgufFile) -> Fields:
    heads = by_layer(model, "{arch}.attention.head_count_kv")
    return {
        **trunk_fields(model, eps="norm_eps"),
        **attention_fields(model),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "conv_L_cache": model.metadata.whole("{arch}.shortconv.l_cache"),
        "conv_bias": any_has(model, "shortconv.in_proj.bias"),
        "intermediate_size": inner_dim(model),
        "block_auto_adjust_ff_dim": False,
    }
