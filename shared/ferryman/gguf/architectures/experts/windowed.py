"""Experts behind attention in windows: Laguna, Mellum and MiMo-V2.

    source   conversion/laguna.py, mellum.py, mimo.py and src/models/ of llama.cpp

A file says the base and the turning part of layers with a window under keys of their own.
"""

from __future__ import annotations

from ferryman.gguf.architectures.config_fields import (
    FULL_LAYER,
    WINDOW_LAYER,
    Fields,
    any_has,
    attention_fields,
    by_layer,
    expert_fields,
    inner_dim,
    rope_fields,
    trunk_fields,
    window_flags,
    window_kinds,
)
from ferryman.gguf.architectures.experts.grouped import GROUPED_EXPERTS, mlp_kinds
from ferryman.gguf.architectures.tensor_names import (
    ATTENTION,
    ENDS,
    NORMS,
    TensorNames,
    expert_names,
    mlp_names,
)
from ferryman.gguf.model_file import GgufFile

_LAGUNA_PERIOD = 4
"""Every so many layers of Laguna one has no window, the first too (src/models/laguna.cpp)."""
_WINDOW_KEY = "{arch}.attention.sliding_window"
_EXPERT_WIDTH = "{arch}.expert_feed_forward_length"


def laguna_names(model: GgufFile) -> TensorNames:
    layer = {
        **NORMS,
        **ATTENTION,
        "attn_gate.weight": "self_attn.g_proj.weight",
        **expert_names("shared_expert"),
        **mlp_names(),
        "exp_probs_b.bias": "mlp.experts.e_score_correction_bias",
    }
    return TensorNames(ENDS, layer)


def laguna_fields(model: GgufFile) -> Fields:
    """Layers differ in their heads; a gate is by head if it has as many rows."""
    metadata, heads = model.metadata, by_layer(model, "{arch}.attention.head_count")
    head_dim = metadata.whole("{arch}.attention.key_length")
    return {
        "architectures": ["LagunaForCausalLM"],
        **trunk_fields(model),
        "num_attention_heads": heads[0],
        "num_attention_heads_per_layer": heads,
        "num_key_value_heads": metadata.whole("{arch}.attention.head_count_kv"),
        "head_dim": head_dim,
        "attention_bias": any_has(model, "attn_q.bias"),
        "gating": "per-head" if _gate_rows(model) == heads[0] else "per-element",
        "rope_parameters": both_ropes(model, head_dim),
        **_laguna_windows(model),
        **expert_fields(model),
        "intermediate_size": inner_dim(model),
        "moe_intermediate_size": metadata.whole(_EXPERT_WIDTH),
        "shared_expert_intermediate_size": metadata.whole(
            "{arch}.expert_shared_feed_forward_length"
        ),
        "moe_routed_scaling_factor": metadata.number("{arch}.expert_weights_scale", 1.0) or 1.0,
        "mlp_layer_types": mlp_kinds(model),
    }


def _gate_rows(model: GgufFile) -> int:
    """The rows of the first layer's gate; 0 without one, which the tables refuse."""
    gate = model.tensors.get("blk.0.attn_gate.weight")
    return gate.shape[0] if gate else 0


def _laguna_windows(model: GgufFile) -> Fields:
    """Laguna M.1 has no windows. A converter leaves the layers' kinds out."""
    metadata, layers = model.metadata, range(model.metadata.num_layers)
    length = metadata.whole(_WINDOW_KEY, 0)
    if not length:
        return {"layer_types": [FULL_LAYER for _ in layers]}
    are_windows = window_flags(model, [layer % _LAGUNA_PERIOD != 0 for layer in layers])
    return {"sliding_window": length, "layer_types": window_kinds(are_windows)}


def both_ropes(model: GgufFile, head_dim: int) -> Fields:
    """The rotations of layers without and with a window; the latter have no scaling."""
    metadata, full = model.metadata, rope_fields(model, head_dim)
    base = full["rope_theta"]
    turning = metadata.whole("{arch}.rope.dimension_count_swa", head_dim)
    if not 0 < turning <= head_dim:
        raise metadata.refusal("{arch}.rope.dimension_count_swa", f"1 to {head_dim}")
    return {
        FULL_LAYER: {
            "rope_type": "default",
            "rope_theta": base,
            "partial_rotary_factor": full.get("partial_rotary_factor", 1.0),
            **full.get("rope_scaling", {}),
        },
        WINDOW_LAYER: {
            "rope_type": "default",
            "rope_theta": metadata.number("{arch}.rope.freq_base_swa", base),
            "partial_rotary_factor": turning / head_dim,
        },
    }


def mellum_fields(model: GgufFile) -> Fields:
    """Shares of experts sum to 1, in llama.cpp as well."""
    metadata, attention = model.metadata, attention_fields(model)
    length = metadata.whole(_WINDOW_KEY, 0)
    are_windows = window_flags(model) if length else [False] * metadata.num_layers
    return {
        "architectures": ["MellumForCausalLM"],
        **trunk_fields(model),
        **attention,
        "rope_parameters": both_ropes(model, attention["head_dim"]),
        **({"sliding_window": length} if length else {}),
        "layer_types": window_kinds(are_windows),
        **expert_fields(model),
        "moe_intermediate_size": metadata.whole(_EXPERT_WIDTH),
        "norm_topk_prob": True,
    }


def mimo2_names(model: GgufFile) -> TensorNames:
    layer = {
        **NORMS,
        **ATTENTION,
        **GROUPED_EXPERTS,
        "attn_sinks.weight": "self_attn.attention_sink_bias",
    }
    return TensorNames(ENDS, layer)


def mimo2_fields(model: GgufFile) -> Fields:
    """Layers with a window have more key heads. Shares of experts sum to 1, in llama.cpp too."""
    metadata, kv_heads = model.metadata, "{arch}.attention.head_count_kv"
    are_windows = window_flags(model)
    head_dim = metadata.whole("{arch}.attention.key_length")
    rope = rope_fields(model, head_dim)
    return {
        "architectures": ["MiMoV2FlashForCausalLM"],
        **trunk_fields(model),
        "num_attention_heads": metadata.whole("{arch}.attention.head_count"),
        "num_key_value_heads": alike(model, kv_heads, are_windows, is_window=False),
        "swa_num_key_value_heads": alike(model, kv_heads, are_windows, is_window=True),
        "head_dim": head_dim,
        "v_head_dim": metadata.whole("{arch}.attention.value_length"),
        "attention_bias": any_has(model, "attn_q.bias"),
        "attention_value_scale": metadata.number("{arch}.attention.value_scale", 0.0) or None,
        "add_full_attention_sink_bias": _has_sinks(model, are_windows, is_window=False),
        "add_swa_attention_sink_bias": _has_sinks(model, are_windows, is_window=True),
        **{"partial_rotary_factor": 1.0, **rope},
        "swa_rope_theta": metadata.number("{arch}.rope.freq_base_swa", rope["rope_theta"]),
        "sliding_window": metadata.whole(_WINDOW_KEY),
        "layer_types": window_kinds(are_windows),
        "mlp_layer_types": mlp_kinds(model),
        **expert_fields(model, count="n_routed_experts"),
        "intermediate_size": inner_dim(model),
        "moe_intermediate_size": metadata.whole(_EXPERT_WIDTH),
        "routed_scaling_factor": metadata.number("{arch}.expert_weights_scale", 1.0) or 1.0,
        # Files write 0 where there are no groups.
        "n_group": metadata.whole("{arch}.expert_group_count", 1) or 1,
        "topk_group": metadata.whole("{arch}.expert_group_used_count", 1) or 1,
        "norm_topk_prob": True,
    }


def alike(model: GgufFile, key: str, are_windows: list[bool], *, is_window: bool) -> int:
    """The number of heads of layers of one kind; any number where there is no such layer."""
    heads = by_layer(model, key)
    counts = {n for n, kind in zip(heads, are_windows, strict=True) if kind is is_window}
    if len(counts) > 1:
        raise model.metadata.refusal(key, "alike in all layers with a window, and in all others")
    return counts.pop() if counts else heads[0]


def _has_sinks(model: GgufFile, are_windows: list[bool], *, is_window: bool) -> bool:
    """Whether a layer of one kind has sinks."""
    return any(
        kind is is_window and f"blk.{layer}.attn_sinks.weight" in model.tensors
        for layer, kind in enumerate(are_windows)
    )
