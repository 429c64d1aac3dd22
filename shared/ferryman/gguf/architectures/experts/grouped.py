"""Experts in groups or beside shared ones: GLM 4.5, dots.llm1, Trinity, HY 3, K-EXAONE; gpt-oss.

source   conversion/glm.py, dots1.py, afmoe.py, hunyuan.py, exaone.py and src/models/ of llama.cpp
"""

from __future__ import annotations

from ferryman.gguf.architectures.config_fields import (
    Fields,
    any_has,
    attention_fields,
    expert_fields,
    inner_dim,
    trunk_fields,
    window_flags,
    window_kinds,
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
from ferryman.gguf.model_file import GgufFile

_POST_NORMS = {
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
}
GROUPED_EXPERTS = {
    **expert_names("shared_experts"),
    **mlp_names(),
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
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
_HEADS_IN_NORMS = {
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_mlp_layernorm.weight",
    "post_ffw_norm.weight": "post_mlp_layernorm.weight",
    "attn_gate.weight": "self_attn.gate_proj.weight",
}
_GATED_CHOICE = {
    "ffn_gate_inp.weight": "mlp.router.gate.weight",
    "exp_probs_b.bias": "mlp.expert_bias",
    "exp_probs_b": "mlp.expert_bias",
}
"""The router of Trinity and HY 3; the file of the latter has its biases without an ending."""
_AFMOE_PERIOD = 4
"""Every so many layers of Trinity one has neither a window nor positions (src/models/afmoe.cpp)."""


def glm4_moe_names(model: GgufFile) -> TensorNames:
    return TensorNames(ENDS, {**_POST_NORMS, **ATTENTION, **GROUPED_EXPERTS})


def dots1_names(model: GgufFile) -> TensorNames:
    return TensorNames(ENDS, {**NORMS, **ATTENTION, **GROUPED_EXPERTS})


def afmoe_names(model: GgufFile) -> TensorNames:
    experts = {**expert_names("shared_experts"), **mlp_names(), **_GATED_CHOICE}
    return TensorNames(ENDS, {**_HEADS_IN_NORMS, **ATTENTION, **experts})


def hy_v3_names(model: GgufFile) -> TensorNames:
    experts = {**expert_names("shared_mlp"), **mlp_names(), **_GATED_CHOICE}
    return TensorNames(ENDS, {**NORMS, **ATTENTION, **experts})


def exaone_moe_names(model: GgufFile) -> TensorNames:
    bias = {"exp_probs_b.bias": "mlp.e_score_correction_bias"}
    return TensorNames(ENDS, {**NORMS, **ATTENTION, **GROUPED_EXPERTS, **bias})


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


def glm4_moe_fields(model: GgufFile) -> Fields:
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        **trunk_fields(model),
        **attention_fields(model),
        "use_qk_norm": any_has(model, "attn_q_norm.weight"),
        **grouped_fields(model),
    }


def dots1_fields(model: GgufFile) -> Fields:
    return {
        "architectures": ["Dots1ForCausalLM"],
        **trunk_fields(model),
        **attention_fields(model),
        **grouped_fields(model),
    }


def afmoe_fields(model: GgufFile) -> Fields:
    """llama.cpp scales embeddings of every model, as published configs ask for."""
    metadata = model.metadata
    return {
        "architectures": ["AfmoeForCausalLM"],
        **trunk_fields(model),
        **attention_fields(model),
        **expert_fields(model),
        "intermediate_size": inner_dim(model),
        "moe_intermediate_size": metadata.whole("{arch}.expert_feed_forward_length"),
        "num_shared_experts": metadata.whole("{arch}.expert_shared_count"),
        "num_dense_layers": num_dense(model),
        "route_scale": metadata.number("{arch}.expert_weights_scale", 1.0) or 1.0,
        "mup_enabled": True,
        "sliding_window": metadata.whole("{arch}.attention.sliding_window"),
        "global_attn_every_n_layers": _AFMOE_PERIOD,
    }


def hy_v3_fields(model: GgufFile) -> Fields:
    metadata, inner = model.metadata, model.metadata.whole("{arch}.expert_feed_forward_length")
    shared = metadata.whole("{arch}.expert_shared_feed_forward_length", inner)
    if not inner or shared % inner:
        raise metadata.refusal("{arch}.expert_shared_feed_forward_length", f"a multiple of {inner}")
    return {
        "architectures": ["HYV3ForCausalLM"],
        **trunk_fields(model),
        **attention_fields(model),
        **expert_fields(model),
        "intermediate_size": inner_dim(model),
        "moe_intermediate_size": inner,
        "num_shared_experts": shared // inner,
        "router_scaling_factor": metadata.number("{arch}.expert_weights_scale", 1.0) or 1.0,
        "mlp_layer_types": mlp_kinds(model),
    }


def exaone_moe_fields(model: GgufFile) -> Fields:
    """Layers without windows have no positions, in llama.cpp as well."""
    metadata, experts = model.metadata, grouped_fields(model)
    return {
        "architectures": ["ExaoneMoeForCausalLM"],
        **trunk_fields(model),
        **attention_fields(model),
        **experts,
        "num_experts": experts["n_routed_experts"],
        "num_shared_experts": experts["n_shared_experts"],
        "mlp_layer_types": mlp_kinds(model),
        "sliding_window": metadata.whole("{arch}.attention.sliding_window"),
        "layer_types": window_kinds(window_flags(model)),
    }


def mlp_kinds(model: GgufFile) -> list[str]:
    """The kind of each layer's MLP: a router tells one with experts."""
    layers = range(model.metadata.num_layers)
    routed = [f"blk.{layer}.ffn_gate_inp.weight" in model.tensors for layer in layers]
    return ["sparse" if has_experts else "dense" for has_experts in routed]


def num_dense(model: GgufFile) -> int:
    """The number of layers before the first with experts."""
    kinds = mlp_kinds(model)
    return kinds.index("sparse") if "sparse" in kinds else len(kinds)


def gpt_oss_fields(model: GgufFile) -> Fields:
    """Every second layer has windows, the first too; the ends of YaRN's ramp are not rounded, as
    published, though no key says so."""
    metadata, attention = model.metadata, attention_fields(model)
    are_windows = window_flags(model, [layer % 2 == 0 for layer in range(metadata.num_layers)])
    return {
        "architectures": ["GptOssForCausalLM"],
        **trunk_fields(model),
        **attention,
        "rope_scaling": {**attention.get("rope_scaling", {}), "truncate": False},
        "sliding_window": metadata.whole("{arch}.attention.sliding_window"),
        "layer_types": window_kinds(are_windows),
        **expert_fields(model, count="num_local_experts"),
        "intermediate_size": metadata.whole("{arch}.expert_feed_forward_length"),
    }


def grouped_fields(model: GgufFile) -> Fields:
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
