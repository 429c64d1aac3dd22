"""Experts of other makers: DeepSeek 2 and 3, GLM 4 with and without experts, dots.llm1, gpt-oss.

llama.cpp multiplies the keys' up-projection into queries, so a file of DeepSeek has the two halves
of `kv_b_proj` apart, the first with its columns as rows.
"""

from __future__ import annotations

from ferryman.gguf.architectures.config_fields import (
    Fields,
    any_has,
    attention_fields,
    by_layer,
    expert_fields,
    inner_dim,
    rope_fields,
    trunk_fields,
)
from ferryman.gguf.architectures.row_orders import alternating
from ferryman.gguf.architectures.tensor_names import (
    ATTENTION,
    ENDS,
    NORMS,
    TensorNames,
    expert_names,
    mlp_names,
)
from ferryman.gguf.architectures.transformer import dense_fields
from ferryman.gguf.model_file import GgufFile

_SIGMOID = 2  # the number of a gating function
_GLM_LITE = ((47, 48), 154_880)
"""Numbers of layers and the vocabulary of GLM-4.7-Flash, whose files say no gating function
(llama.cpp, src/models/deepseek2.cpp)."""
_POST_NORMS = {
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
}
_EXPERTS = {
    **expert_names("shared_experts"),
    **mlp_names(),
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
_LATENT = {
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
GATE_UP, DOWN, GATE_UP_BIAS = (
    f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj", "gate_up_proj_bias")
)
_GPT_OSS = {
    **_POST_NORMS,
    **ATTENTION,
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp.weight": "mlp.router.weight",
    "ffn_gate_inp.bias": "mlp.router.bias",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}
_GLM4 = {
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_self_attn_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "post_ffw_norm.weight": "post_mlp_layernorm.weight",
    **ATTENTION,
    "ffn_up.weight": "mlp.gate_up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def deepseek_names(model: GgufFile) -> TensorNames:
    halves = {("attn_k_b.weight", "attn_v_b.weight"): "self_attn.kv_b_proj.weight"}
    return TensorNames(ENDS, {**NORMS, **_LATENT, **_EXPERTS}, joined_heads=halves)


def glm4_moe_names(model: GgufFile) -> TensorNames:
    return TensorNames(ENDS, {**_POST_NORMS, **ATTENTION, **_EXPERTS})


def dots1_names(model: GgufFile) -> TensorNames:
    return TensorNames(ENDS, {**NORMS, **ATTENTION, **_EXPERTS})


def glm4_names(model: GgufFile) -> TensorNames:
    return TensorNames(ENDS, _GLM4)


def gpt_oss_names(model: GgufFile) -> TensorNames:
    """In a folder rows of gate and up alternate, and experts have rows as columns."""
    order = alternating(model.metadata.whole("{arch}.expert_feed_forward_length"))
    return TensorNames(
        ENDS,
        _GPT_OSS,
        joined={
            ("ffn_gate_exps.weight", "ffn_up_exps.weight"): GATE_UP,
            ("ffn_down_exps.weight",): DOWN,
            ("ffn_gate_exps.bias", "ffn_up_exps.bias"): GATE_UP_BIAS,
        },
        transposed=(GATE_UP, DOWN),
        stacked_vectors=(GATE_UP_BIAS,),
        joined_orders={GATE_UP: order, GATE_UP_BIAS: order},
    )


def deepseek_fields(model: GgufFile) -> Fields:
    """DeepSeek-V3 if experts are chosen by sigmoids, V2 if by a softmax."""
    metadata, trunk = model.metadata, trunk_fields(model)
    heads, rope_dim = (
        metadata.whole("{arch}.attention.head_count"),
        metadata.whole("{arch}.rope.dimension_count"),
    )
    key, value = (_latent_size(model, name) for name in ("key_length", "value_length"))
    if key <= rope_dim:
        raise metadata.refusal("{arch}.rope.dimension_count", f"below the {key} of a key")
    is_v3 = _chooses_by_sigmoids(model, trunk)
    return {
        "architectures": ["DeepseekV3ForCausalLM" if is_v3 else "DeepseekV2ForCausalLM"],
        **trunk,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": metadata.whole("{arch}.attention.q_lora_rank", 0),
        "kv_lora_rank": metadata.whole("{arch}.attention.kv_lora_rank"),
        "qk_nope_head_dim": key - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": value,
        **_grown(model, rope_fields(model, rope_dim)),
        **_grouped_fields(model),
        **({} if is_v3 else _softmax_fields(model)),
    }


def glm4_moe_fields(model: GgufFile) -> Fields:
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        **trunk_fields(model),
        **attention_fields(model),
        "use_qk_norm": any_has(model, "attn_q_norm.weight"),
        **_grouped_fields(model),
    }


def dots1_fields(model: GgufFile) -> Fields:
    return {
        "architectures": ["Dots1ForCausalLM"],
        **trunk_fields(model),
        **attention_fields(model),
        **_grouped_fields(model),
    }


def glm4_fields(model: GgufFile) -> Fields:
    return dense_fields(model, "Glm4ForCausalLM")


def gpt_oss_fields(model: GgufFile) -> Fields:
    """Every second layer has windows, the first too; the ends of YaRN's ramp are not rounded, as
    published, though no key says so."""
    metadata, attention = model.metadata, attention_fields(model)
    pattern, num_layers = "{arch}.attention.sliding_window_pattern", metadata.num_layers
    has_window = [layer % 2 == 0 for layer in range(num_layers)]
    if metadata.has(pattern):
        has_window = [bool(flag) for flag in by_layer(model, pattern)]
    return {
        "architectures": ["GptOssForCausalLM"],
        **trunk_fields(model),
        **attention,
        "rope_scaling": {**attention.get("rope_scaling", {}), "truncate": False},
        "sliding_window": metadata.whole("{arch}.attention.sliding_window"),
        "layer_types": [
            "sliding_attention" if window else "full_attention" for window in has_window
        ],
        **expert_fields(model, count="num_local_experts"),
        "intermediate_size": metadata.whole("{arch}.expert_feed_forward_length"),
    }


def _grouped_fields(model: GgufFile) -> Fields:
    """Dense layers first, then experts in groups beside shared ones."""
    metadata = model.metadata
    return {
        "intermediate_size": inner_dim(model),
        **expert_fields(model, count="n_routed_experts"),
        "n_shared_experts": metadata.whole("{arch}.expert_shared_count"),
        "moe_intermediate_size": metadata.whole("{arch}.expert_feed_forward_length"),
        "first_k_dense_replace": metadata.whole("{arch}.leading_dense_block_count", 0),
        "n_group": metadata.whole("{arch}.expert_group_count", 1) or 1,
        "topk_group": metadata.whole("{arch}.expert_group_used_count", 1) or 1,
        "norm_topk_prob": metadata.flag("{arch}.expert_weights_norm", False),
        "routed_scaling_factor": metadata.number("{arch}.expert_weights_scale", 1.0) or 1.0,
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


def _latent_size(model: GgufFile, name: str) -> int:
    """The channels of a head's key or value; older files have no other sizes than these."""
    wide = f"{{arch}}.attention.{name}_mla"
    metadata = model.metadata
    return metadata.whole(wide if metadata.has(wide) else f"{{arch}}.attention.{name}")


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
