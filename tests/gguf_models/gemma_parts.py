"""Gemma 3n and 4 as GGUF files, by a second reading of llama.cpp's converter.

`hybrid_conversion.py` names its tree; there it is conversion/gemma.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import NormalDist
from typing import Any

import numpy as np
from tools.bench.gguf.container import Setting

_NAMES = {
    "embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
}
_PARTS = {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    "per_layer_input_gate.weight": "inp_gate.weight",
    "per_layer_projection.weight": "proj.weight",
    "post_per_layer_input_norm.weight": "post_norm.weight",
    "altup.correction_coefs.weight": "altup_correct_coef.weight",
    "altup.correct_output_scale": "altup_correct_scale.weight",
    "altup.prediction_coefs.weight": "altup_predict_coef.weight",
    "altup.modality_router.weight": "altup_router.weight",
    "altup.router_norm.weight": "altup_router_norm.weight",
    "laurel.linear_left.weight": "laurel_l.weight",
    "laurel.linear_right.weight": "laurel_r.weight",
    "laurel.post_laurel_norm.weight": "laurel_post_norm.weight",
    "layer_scalar": "layer_output_scale.weight",
    "router.proj.weight": "ffn_gate_inp.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
}
_STACKS = {"altup_projections": "altup_proj", "altup_unembed_projections": "altup_unembd_proj"}


def gemma_target(name: str) -> str | None:
    """The name in the file of a tensor that other architectures do not have."""
    if name.startswith("model.layers."):
        _, _, layer, inside = name.split(".", 3)
        return f"blk.{layer}.{_PARTS[inside]}" if inside in _PARTS else None
    return _NAMES.get(name.removeprefix("model."))


def stream_stacks(tensors: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """The projections of the streams after the first, in one tensor each."""
    for part, target in _STACKS.items():
        names = [name for name in sorted(tensors) if name.startswith(f"model.{part}.")]
        if names:
            yield f"{target}.weight", np.stack([tensors[name] for name in names])


def wave_factors(config: Mapping[str, Any]) -> np.ndarray:
    """The factors of full layers in Gemma 4: waves that stand still have a huge one."""
    half = _full(config)["head_dim"] // 2
    share = config["rope_parameters"]["full_attention"]["partial_rotary_factor"]
    return np.where(np.arange(half) < int(share * half), 1.0, 1e30).astype("f4")


def gemma_keys(architecture: str, config: Mapping[str, Any]) -> dict[str, Setting]:
    rope, are_windows = config["rope_parameters"], _are_windows(config)
    keys: dict[str, Setting] = {
        "attention.sliding_window_pattern": are_windows,
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "final_logit_softcapping": config["final_logit_softcapping"],
        "rope.freq_base": float(rope["full_attention"]["rope_theta"]),
        "rope.freq_base_swa": float(rope["sliding_attention"]["rope_theta"]),
    }
    own = _streams(config) if architecture == "gemma3n" else _sizes(config, are_windows)
    return {**keys, **own}


def _are_windows(config: Mapping[str, Any]) -> list[bool]:
    return [kind == "sliding_attention" for kind in config["layer_types"]]


def _streams(config: Mapping[str, Any]) -> dict[str, Setting]:
    shares = config["activation_sparsity_pattern"]
    return {
        "altup.active_idx": config["altup_active_idx"],
        "altup.num_inputs": config["altup_num_inputs"],
        "activation_sparsity_scale": [
            float(NormalDist().inv_cdf(share)) if share else float("-inf") for share in shares
        ],
        "feed_forward_length": config["intermediate_size"],
    }


def _full(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a full layer, as transformers writes them."""
    return {**config, **config["per_layer_config"]["1"]}


def _sizes(config: Mapping[str, Any], are_windows: list[bool]) -> dict[str, Setting]:
    far, near = _full(config), config["head_dim"]
    width, num_layers = config["intermediate_size"], len(are_windows)
    num_own = num_layers - config["num_kv_shared_layers"]
    keys: dict[str, Setting] = {
        f"{name}{ending}": size
        for name in ("attention.key_length", "attention.value_length", "rope.dimension_count")
        for ending, size in (("", far["head_dim"]), ("_swa", near))
    }
    if config["use_double_wide_mlp"]:
        widths = [width] * num_own + [2 * width] * (num_layers - num_own)
        keys["feed_forward_length"] = widths
    if "num_key_value_heads" in config["per_layer_config"]["1"]:
        both = far["num_key_value_heads"], config["num_key_value_heads"]
        keys["attention.head_count_kv"] = [both[flag] for flag in are_windows]
    if config["enable_moe_block"]:
        keys["expert_used_count"] = config["top_k_experts"]
    return keys
