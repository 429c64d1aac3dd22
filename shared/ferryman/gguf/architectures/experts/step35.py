"""The text of Step 3.5 and 3.7 (StepFun): gated heads in windows or not, experts with limits.

    source   conversion/step3.py, src/models/step35.cpp and src/llama-graph.cpp of llama.cpp

Half of a head turns in a layer without a window, and all of it in the others, which no key says.
Llama 3.1's factors are those of the former alone; a file has ones behind them. Its names are those
of published folders.
"""

from __future__ import annotations

from ferryman.gguf.architectures.config_fields import (
    FULL_LAYER,
    Fields,
    any_has,
    by_layer,
    expert_fields,
    inner_dim,
    trunk_fields,
    window_flags,
    window_kinds,
)
from ferryman.gguf.architectures.experts.grouped import mlp_kinds
from ferryman.gguf.architectures.experts.windowed import alike, both_ropes
from ferryman.gguf.architectures.tensor_names import (
    ATTENTION,
    ENDS,
    NORMS,
    TensorNames,
    mlp_names,
)
from ferryman.gguf.model_file import GgufFile

_SIGMOID = 2  # the number of a gating function
_EXPERTS = {
    "ffn_gate_inp.weight": "moe.gate.weight",
    "exp_probs_b.bias": "moe.router_bias",
    **{f"ffn_{part}_exps.weight": f"moe.{part}_proj.weight" for part in ("gate", "up", "down")},
    **{
        f"ffn_{part}_shexp.weight": f"share_expert.{part}_proj.weight"
        for part in ("gate", "up", "down")
    },
}


def step35_names(model: GgufFile) -> TensorNames:
    gate = {"attn_gate.weight": "self_attn.g_proj.weight"}
    layer = {**NORMS, **ATTENTION, **gate, **mlp_names(), **_EXPERTS}
    return TensorNames(ENDS, layer, norms_around_one=True)


def step35_fields(model: GgufFile) -> Fields:
    """Layers with a window have other numbers of query heads, but as many key heads."""
    metadata, are_windows = model.metadata, window_flags(model)
    heads, kv_heads = "{arch}.attention.head_count", "{arch}.attention.head_count_kv"
    if len(set(by_layer(model, kv_heads))) > 1:
        raise metadata.refusal(kv_heads, "alike in all layers")
    head_dim = metadata.whole("{arch}.attention.key_length")
    return {
        "architectures": ["Step3p5ForCausalLM"],
        **trunk_fields(model),
        "num_attention_heads": alike(model, heads, are_windows, is_window=False),
        "num_sliding_attention_heads": alike(model, heads, are_windows, is_window=True),
        "num_key_value_heads": by_layer(model, kv_heads)[0],
        "head_dim": head_dim,
        "attention_bias": any_has(model, "attn_q.bias"),
        "rope_parameters": _ropes(model, head_dim),
        "sliding_window": metadata.whole("{arch}.attention.sliding_window"),
        "layer_types": window_kinds(are_windows),
        **_mixture_fields(model),
    }


def _ropes(model: GgufFile, head_dim: int) -> Fields:
    ropes = both_ropes(model, head_dim)
    turning = model.metadata.whole("{arch}.rope.dimension_count", head_dim) // 2
    full = {**ropes[FULL_LAYER], "partial_rotary_factor": turning / head_dim}
    for name in ("long_factor", "short_factor"):
        if name in full:
            full[name] = full[name][: turning // 2]
    return {**ropes, FULL_LAYER: full}


def _mixture_fields(model: GgufFile) -> Fields:
    metadata, gating = model.metadata, "{arch}.expert_gating_func"
    if metadata.whole(gating, 0) not in (0, _SIGMOID):
        raise metadata.refusal(gating, "2 (sigmoid), or left out")
    return {
        **expert_fields(model, count="n_routed_experts"),
        "mlp_layer_types": mlp_kinds(model),
        "intermediate_size": inner_dim(model),
        "moe_intermediate_size": metadata.whole("{arch}.expert_feed_forward_length"),
        "share_expert_dim": metadata.whole("{arch}.expert_shared_feed_forward_length"),
        "moe_router_scaling_factor": metadata.number("{arch}.expert_weights_scale", 1.0) or 1.0,
        "norm_expert_weight": metadata.flag("{arch}.expert_weights_norm", True),
        "swiglu_limits": _limits(model, "{arch}.swiglu_clamp_exp"),
        "swiglu_limits_shared": _limits(model, "{arch}.swiglu_clamp_shexp"),
    }


def _limits(model: GgufFile, key: str) -> list[float] | None:
    """The limit of each layer's activations; a file has those of drafting layers behind them."""
    metadata = model.metadata
    return metadata.numbers(key)[: metadata.num_layers] if metadata.has(key) else None
