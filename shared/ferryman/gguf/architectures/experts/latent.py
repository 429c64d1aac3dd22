"""Experts behind latent attention: DeepSeek 2, 3 and 3.2, Mistral 4, GLM-4.7-Flash, GLM-5 and Kimi
Linear.

source   conversion/deepseek.py, mistral3.py, glm.py, kimi_linear.py and src/models/ of llama.cpp

llama.cpp multiplies the keys' up-projection into queries, so a file has the two halves of
`kv_b_proj` apart, the first with its columns as rows.
"""

from __future__ import annotations

from ferryman.gguf.architectures.config_fields import (
    Fields,
    any_has,
    by_layer,
    rope_fields,
    trunk_fields,
)
from ferryman.gguf.architectures.experts.grouped import GROUPED_EXPERTS, grouped_fields
from ferryman.gguf.architectures.tensor_names import ENDS, NORMS, TensorNames, mlp_names
from ferryman.gguf.architectures.transformer import MIXTRAL_EXPERTS
from ferryman.gguf.model_file import GgufFile

_SOFTMAX, _SIGMOID = 1, 2  # numbers of gating functions
_GLM_LITE = ((47, 48), 154_880)
"""Numbers of layers and the vocabulary of GLM-4.7-Flash, whose files say no gating function
(llama.cpp, src/models/deepseek2.cpp)."""
LATENT = {
    f"attn_{there}.weight": f"self_attn.{here}.weight"
    for there, here in {
        "q": "q_proj",
        "q_a": "q_a_proj",
        "q_b": "q_b_proj",
        "q_a_norm": "q_a_layernorm",
        "kv_a_mqa": "kv_a_proj_with_mqa",
        "kv_a_norm": "kv_a_layernorm",
        "kv_b": "kv_b_proj",
        "output": "o_proj",
    }.items()
}
_STACKS = {
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
}
MISTRAL4_GROWTH = 0.1
"""The growth of queries in Mistral Small 4, whose key its converter leaves out."""
HALVES = {("attn_k_b.weight", "attn_v_b.weight"): "self_attn.kv_b_proj.weight"}
_DELTA = {
    **{f"ssm_conv1d_{part}.weight": f"self_attn.{part}_conv1d.weight" for part in "qkv"},
    **{
        f"ssm_{gate}_{part}.weight": f"self_attn.{gate}_{part}_proj.weight"
        for gate in "fg"
        for part in "ab"
    },
    **{f"attn_{part}.weight": f"self_attn.{part}_proj.weight" for part in "qkv"},
    "ssm_beta.weight": "self_attn.b_proj.weight",
    "ssm_a": "self_attn.A_log",
    "ssm_dt.bias": "self_attn.dt_bias",
    "ssm_norm.weight": "self_attn.o_norm.weight",
}
_INDEXER = {
    f"indexer.{there}": f"self_attn.indexer.{here}"
    for there, here in {
        "attn_q_b.weight": "wq_b.weight",
        "attn_k.weight": "wk.weight",
        "k_norm.weight": "k_norm.weight",
        "k_norm.bias": "k_norm.bias",
        "proj.weight": "weights_proj.weight",
    }.items()
}


def deepseek_names(model: GgufFile) -> TensorNames:
    return TensorNames(ENDS, {**NORMS, **LATENT, **GROUPED_EXPERTS}, joined_heads=HALVES)


def sparse_deepseek_names(model: GgufFile) -> TensorNames:
    """DeepSeek's with indexers."""
    layer = {**NORMS, **LATENT, **_INDEXER, **GROUPED_EXPERTS}
    return TensorNames(ENDS, layer, joined_heads=HALVES)


def deepseek_fields(model: GgufFile) -> Fields:
    """DeepSeek-V3 if experts are chosen by sigmoids, V2 if by a softmax."""
    growth = "{arch}.attention.temperature_scale"
    if model.metadata.number(growth, 0.0):
        raise model.metadata.refusal(growth, "0, or left out: queries do not grow in this model")
    fields = _latent_fields(model)
    is_v3 = _chooses_by_sigmoids(model, fields)
    return {
        "architectures": ["DeepseekV3ForCausalLM" if is_v3 else "DeepseekV2ForCausalLM"],
        **fields,
        **({} if is_v3 else _softmax_fields(model)),
    }


def _latent_fields(model: GgufFile) -> Fields:
    """Latent attention that turns, and experts in groups."""
    return {
        **trunk_fields(model),
        **latent_sizes(model),
        **_grown(model, rope_fields(model, model.metadata.whole("{arch}.rope.dimension_count"))),
        **grouped_fields(model),
    }


def mistral4_names(model: GgufFile) -> TensorNames:
    """A file has gate and up of experts in one tensor, as the folder, or apart."""
    stacks = _STACKS if any_has(model, "ffn_gate_up_exps.weight") else {}
    layer = {**NORMS, **LATENT, **GROUPED_EXPERTS, **stacks}
    return TensorNames(ENDS, layer, joined_heads=HALVES)


def mistral4_fields(model: GgufFile) -> Fields:
    """DeepSeek-V3 with experts by a softmax. Queries grow from YaRN's first context on: without the
    key, as published."""
    metadata, fields, gating = model.metadata, _latent_fields(model), "{arch}.expert_gating_func"
    if metadata.whole(gating, 0) not in (0, _SOFTMAX):
        raise metadata.refusal(gating, "1 (softmax), or left out")
    rope = {"rope_theta": fields["rope_theta"], **fields.pop("rope_scaling", {})}
    if "original_max_position_embeddings" in rope:
        growth = metadata.number("{arch}.attention.temperature_scale", MISTRAL4_GROWTH)
        rope["llama_4_scaling_beta"] = growth
    return {"architectures": ["Mistral4ForCausalLM"], **fields, "rope_parameters": rope}


def deepseek_v32_fields(model: GgufFile) -> Fields:
    """DeepSeek-V3 with an indexer in every layer."""
    return {
        **deepseek_fields(model),
        "architectures": ["DeepseekV32ForCausalLM"],
        **indexer_fields(model),
    }


def glm_dsa_fields(model: GgufFile) -> Fields:
    """GLM-5: the same; in GLM-5.2 only some layers have an indexer, by a key or by its tensors."""
    metadata, key = model.metadata, "{arch}.attention.indexer.types"
    layers = range(metadata.num_layers)
    have = [f"blk.{layer}.indexer.attn_k.weight" in model.tensors for layer in layers]
    if metadata.has(key):
        have = list(map(bool, by_layer(model, key)))
    return {
        **deepseek_fields(model),
        "architectures": ["GlmMoeDsaForCausalLM"],
        **indexer_fields(model),
        "indexer_types": ["full" if has_indexer else "shared" for has_indexer in have],
    }


def kimi_linear_names(model: GgufFile) -> TensorNames:
    experts = {
        there: here.replace("mlp.", "block_sparse_moe.")
        for there, here in {**GROUPED_EXPERTS, **MIXTRAL_EXPERTS}.items()
    }
    layer = {**NORMS, **LATENT, **_DELTA, **experts, **mlp_names()}
    return TensorNames(
        ENDS,
        layer,
        joined_heads=HALVES,
        vectors=("self_attn.A_log",),
        logs=("self_attn.A_log",),
        convolutions=tuple(f"self_attn.{part}_conv1d.weight" for part in "qkv"),
    )


def kimi_linear_fields(model: GgufFile) -> Fields:
    """A layer without key heads is one of Kimi Delta Attention. Shares of experts sum to 1, in
    llama.cpp as well."""
    metadata, experts = model.metadata, grouped_fields(model)
    kv_heads = by_layer(model, "{arch}.attention.head_count_kv")
    return {
        "architectures": ["KimiLinearForCausalLM"],
        **trunk_fields(model),
        **latent_sizes(model),
        **experts,
        "num_experts": experts["n_routed_experts"],
        "num_shared_experts": experts["n_shared_experts"],
        "norm_topk_prob": True,
        "linear_attn_config": {
            "full_attn_layers": [layer for layer, heads in enumerate(kv_heads, 1) if heads],
            "kda_layers": [layer for layer, heads in enumerate(kv_heads, 1) if not heads],
            "num_heads": metadata.whole("{arch}.attention.head_count"),
            "head_dim": metadata.whole("{arch}.kda.head_dim"),
            "short_conv_kernel_size": metadata.whole("{arch}.ssm.conv_kernel"),
        },
    }


def indexer_fields(model: GgufFile) -> Fields:
    metadata = model.metadata
    return {
        "index_n_heads": metadata.whole("{arch}.attention.indexer.head_count"),
        "index_head_dim": metadata.whole("{arch}.attention.indexer.key_length"),
        "index_topk": metadata.whole("{arch}.attention.indexer.top_k"),
    }


def latent_sizes(model: GgufFile) -> Fields:
    """The sizes of latent attention, of which every layer has as many heads."""
    heads = model.metadata.whole("{arch}.attention.head_count")
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": model.metadata.whole("{arch}.attention.q_lora_rank", 0),
        **latent_dims(model),
    }


def latent_dims(model: GgufFile, ending: str = "") -> Fields:
    """The rank and the channels of a head, by keys with this ending."""
    metadata, rope_dim = model.metadata, model.metadata.whole("{arch}.rope.dimension_count")
    key, value = (_latent_size(model, name, ending) for name in ("key_length", "value_length"))
    if key <= rope_dim:
        raise metadata.refusal("{arch}.rope.dimension_count", f"below the {key} of a key")
    return {
        "kv_lora_rank": metadata.whole("{arch}.attention.kv_lora_rank" + ending),
        "qk_nope_head_dim": key - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": value,
    }


def _softmax_fields(model: GgufFile) -> Fields:
    groups = model.metadata.whole("{arch}.expert_group_count", 1)
    return {"topk_method": "group_limited_greedy" if groups > 1 else "greedy"}


def _chooses_by_sigmoids(model: GgufFile, trunk: Fields) -> bool:
    key = "{arch}.expert_gating_func"
    if model.metadata.has(key):
        return model.metadata.whole(key) == _SIGMOID
    nums_layers, vocab_size = _GLM_LITE
    of_lite = trunk["num_hidden_layers"] in nums_layers and trunk["vocab_size"] == vocab_size
    return of_lite or any_has(model, "exp_probs_b.bias")


def _latent_size(model: GgufFile, name: str, ending: str) -> int:
    """The channels of a head's key or value; older files have no other sizes than these."""
    wide = f"{{arch}}.attention.{name}_mla{ending}"
    metadata = model.metadata
    return metadata.whole(wide if metadata.has(wide) else f"{{arch}}.attention.{name}{ending}")


def _grown(model: GgufFile, rope: Fields) -> Fields:
    """YaRN's growth of scores: the key has a tenth of `mscale_all_dim`, which `mscale` equals in
    published models."""
    growth = model.metadata.number("{arch}.rope.scaling.yarn_log_multiplier", 0.0)
    if "rope_scaling" not in rope or not growth:
        return rope
    scale = float(f"{10 * growth:.6g}")
    return {
        **rope,
        "rope_scaling": {**rope["rope_scaling"], "mscale_all_dim": scale, "mscale": scale},
    }
