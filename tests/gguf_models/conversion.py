"""Tiny model folders as GGUF files, by a second reading of llama.cpp's converter.

The tables go from a folder to a file, word for word; nothing is shared with what is tested.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file
from tests.gguf_models.files import floats, write
from tools.bench.gguf.container import Setting

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
    "model.norm.bias": "output_norm.bias",
}
_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GLM4 = {
    "post_self_attn_layernorm": "post_attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "mlp.gate_up_proj": "ffn_up",
}
_BEHIND = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_HUNYUAN = {"self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"}
_PHI2 = {
    "model.final_layernorm.weight": "output_norm.weight",
    "model.final_layernorm.bias": "output_norm.bias",
    "lm_head.bias": "output.bias",
    "self_attn.dense": "attn_output",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
_GPT_NEOX = {
    "gpt_neox.embed_in.weight": "token_embd.weight",
    "gpt_neox.final_layer_norm.weight": "output_norm.weight",
    "gpt_neox.final_layer_norm.bias": "output_norm.bias",
    "embed_out.weight": "output.weight",
    "attention.query_key_value": "attn_qkv",
    "attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
}
_HUNYUAN_MOE = {
    **_HUNYUAN,
    "mlp.gate.wg": "ffn_gate_inp",
    "mlp.shared_mlp.gate_proj": "ffn_gate_shexp",
    "mlp.shared_mlp.up_proj": "ffn_up_shexp",
    "mlp.shared_mlp.down_proj": "ffn_down_shexp",
}
_ERNIE_MOE = {
    "mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
_OF_ARCHITECTURE = {
    "phi2": _PHI2,
    "phi3": {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    "starcoder2": {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
    "gptneox": _GPT_NEOX,
    "hunyuan-moe": _HUNYUAN_MOE,
    "ernie4_5-moe": _ERNIE_MOE,
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "glm4": _GLM4,
    "olmo2": _BEHIND,
    "exaone4": _BEHIND,
    "seed_oss": {"post_attention_layernorm": "post_attention_norm"},
    "hunyuan-dense": _HUNYUAN,
}
_PAIRED = ("llama", "smollm3", "granite", "olmo")
_WITH_PATTERN = ("olmo2", "exaone4")
_EXPERT = re.compile(
    r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)"
)
_HEAD_NORM = re.compile(r"self_attn\.([qk])_layernorm\.norms\.(\d+)")
_EXPERT_NAMES = {"w1": "gate", "w3": "up", "w2": "down"}
_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "attention.sliding_window": "sliding_window",
    "attention.clamp_kqv": "clip_qkv",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "rope.scaling.original_context_length": "trained",
    "rope.scaling.attn_factor": "growth",
    "logit_scale": "logit_scale",
    "use_parallel_residual": "use_parallel_residual",
    "interleave_moe_layer_step": "moe_layer_interval",
    "leading_dense_block_count": "moe_layer_start_index",
    "expert_shared_count": "moe_num_shared_experts",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}


def write_converted(
    folder: Path, file: Path, architecture: str, more: Mapping[str, Setting] | None = None
) -> Path:
    """Writes the model in `folder` to `file`, its tensors in float32."""
    config = json.loads((folder / "config.json").read_text())
    # transformers 5 writes another name.
    config.setdefault("num_experts", config.get("num_local_experts"))
    config |= _renamed(architecture, config)
    keys = {
        f"{architecture}.{key}": config[field]
        for key, field in _SIZES.items()
        if config.get(field) is not None
    }
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    theta = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    if factor := rope.get("partial_rotary_factor"):
        keys[f"{architecture}.rope.dimension_count"] = int(factor * _head_dim(config))
    if architecture in _WITH_PATTERN and config.get("sliding_window"):
        pattern = [kind == "sliding_attention" for kind in config["layer_types"]]
        keys[f"{architecture}.attention.sliding_window_pattern"] = pattern
    metadata: dict[str, Setting] = {
        "general.architecture": architecture,
        **keys,
        f"{architecture}.rope.freq_base": float(theta),
        "tokenizer.ggml.eos_token_id": 2,
        **(more or {}),
    }
    tensors = load_file(folder / "model.safetensors")
    written = dict(
        _written(architecture, config, name, tensor.float().numpy())
        for name, tensor in tensors.items()
        if not (_EXPERT.search(name) or _HEAD_NORM.search(name))
    )
    written |= {
        f"rope_factors_{length}.weight": np.array(rope[f"{length}_factor"], "<f4")
        for length in ("long", "short")
        if f"{length}_factor" in rope
    }
    written |= _experts({name: tensor.float().numpy() for name, tensor in tensors.items()})
    return write(file, metadata, [floats(name, values) for name, values in written.items()])


def _head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _renamed(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of an architecture under the names that others have."""
    if architecture in ("minimax-m2", "hunyuan-moe"):
        more = {"moe_intermediate_size": config["intermediate_size"]}
        topk = config.get("moe_topk")
        return more if topk is None else {**more, "num_experts_per_tok": topk}
    if architecture == "ernie4_5-moe":
        names = {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"}
        return {name: config[field] for name, field in names.items()}
    if architecture in ("olmo", "starcoder2"):
        # A config of OLMo 1 has none: it is a constant.
        return {"layer_norm_eps": config.get("norm_epsilon", 1e-5)}
    if architecture == "phi3":
        trained = config["original_max_position_embeddings"]
        times = config["max_position_embeddings"] / trained
        growth = math.sqrt(1 + math.log(times) / math.log(trained))
        window = config["sliding_window"] or 0
        return {"trained": trained, "sliding_window": window, "growth": growth}
    return {}


def _written(
    architecture: str, config: Mapping[str, Any], name: str, values: np.ndarray
) -> tuple[str, np.ndarray]:
    target = _target(architecture, name)
    if architecture.startswith("gemma") and target.endswith("norm.weight"):
        values = values + np.float32(1)
    if architecture in _PAIRED and re.search(r"attn_[qk]\.", target):
        heads = "num_attention_heads" if "attn_q" in target else "num_key_value_heads"
        # As llama.cpp's converter does: the halves of each head become neighbours.
        by_half = values.reshape(config[heads], 2, -1, *values.shape[1:])
        values = by_half.swapaxes(1, 2).reshape(values.shape)
    if architecture == "gptneox" and "attn_qkv" in target:
        by_head = values.reshape(config["num_attention_heads"], 3, -1, *values.shape[1:])
        values = by_head.swapaxes(0, 1).reshape(values.shape)
    if target.endswith(("ffn_gate_inp_shexp.weight", "exp_probs_b.bias")) and values.ndim == 2:
        values = values[0]
    return target, values


def _target(architecture: str, name: str) -> str:
    names = {**_NAMES, **_OF_ARCHITECTURE.get(architecture, {})}
    match = re.fullmatch(r"(?:model|gpt_neox)\.layers\.(\d+)\.(.*)", name)
    if match is None:
        return names[name]
    if match[2] in names:
        return f"blk.{match[1]}.{names[match[2]]}"
    part, _, kind = match[2].rpartition(".")
    return f"blk.{match[1]}.{names[part]}.{kind}"


def _experts(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The experts of each layer, or the norms of its heads, on an axis of their own."""
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, values in tensors.items():
        if match := _HEAD_NORM.search(name):
            target = f"blk.{name.split('.')[2]}.attn_{match[1]}_norm.weight"
            stacks.setdefault(target, {})[int(match[2])] = values
        if match := _EXPERT.search(name):
            layer, part = name.split(".")[2], match[2].removesuffix("_proj")
            target = f"blk.{layer}.ffn_{_EXPERT_NAMES.get(part, part)}_exps.weight"
            stacks.setdefault(target, {})[int(match[1])] = values
    return {
        name: np.stack([stack[index] for index in range(len(stack))])
        for name, stack in stacks.items()
    }


def split_experts(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors of transformers 5, which stacks experts, under the published names of each one."""
    separate: dict[str, Any] = {}
    for name, values in tensors.items():
        prefix, is_stack, part = name.partition(".experts.")
        if not is_stack or part[0].isdigit():
            separate[name] = values
            continue
        for index, of_expert in enumerate(values):
            if part == "down_proj":
                separate[f"{prefix}.experts.{index}.down_proj.weight"] = of_expert.clone()
            else:
                gate, up = of_expert.chunk(2)
                separate[f"{prefix}.experts.{index}.gate_proj.weight"] = gate.clone()
                separate[f"{prefix}.experts.{index}.up_proj.weight"] = up.clone()
    return separate
