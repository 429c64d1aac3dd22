"""Tiny hybrids and mixtures as GGUF files, by a second reading of llama.cpp's converter.

    source   convert_hf_to_gguf.py and conversion/*.py of the tree in llama-cpp-python 0.3.36

Each rule goes from a folder to a file; nothing is shared with what is tested. That converter itself
wrote the same files for the models of `test_hybrids.py`: keys, names, shapes and bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file
from tests.gguf_models.conversion import split_experts
from tests.gguf_models.files import WrittenTensor, floats, write
from tests.gguf_models.gemma_parts import gemma_target, stream_stacks, wave_factors
from tests.gguf_models.hybrid_keys import Config, common_keys, own_keys
from tools.bench.gguf.container import Setting

Named = Iterator[tuple[str, np.ndarray]]

_ENDS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "backbone.embeddings.weight": "token_embd.weight",
    "model.embeddings.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.norm_f.weight": "output_norm.weight",
    "model.final_layernorm.weight": "output_norm.weight",
    "backbone.norm_f.weight": "output_norm.weight",
    "model.embedding_norm.weight": "token_embd_norm.weight",
    "lm_head.weight": "output.weight",
}
_PARTS = {
    "norm": "attn_norm",
    "input_layernorm": "attn_norm",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "pre_ff_layernorm": "ffn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "q_layernorm": "attn_q_norm",
    "k_layernorm": "attn_k_norm",
    "q_a_proj": "attn_q_a",
    "q_b_proj": "attn_q_b",
    "q_a_layernorm": "attn_q_a_norm",
    "kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "kv_a_layernorm": "attn_kv_a_norm",
    "sinks": "attn_sinks.weight",
    "in_proj": "ssm_in",
    "in_proj_ba": "ssm_ba",
    "in_proj_qkv": "attn_qkv",
    "in_proj_z": "attn_gate",
    "in_proj_b": "ssm_beta",
    "in_proj_a": "ssm_alpha",
    "conv1d": "ssm_conv1d",
    "x_proj": "ssm_x",
    "dt_proj": "ssm_dt",
    "dt_bias": "ssm_dt.bias",
    "A_log": "ssm_a",
    "D": "ssm_d",
    "out_proj": "ssm_out",
    "dt_layernorm": "ssm_dt_norm",
    "b_layernorm": "ssm_b_norm",
    "c_layernorm": "ssm_c_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "w1": "ffn_gate",
    "w3": "ffn_up",
    "w2": "ffn_down",
    "gate": "ffn_gate_inp",
    "router": "ffn_gate_inp",
    "shared_expert_gate": "ffn_gate_inp_shexp",
    "e_score_correction_bias": "exp_probs_b.bias",
    "expert_bias": "exp_probs_b.bias",
    "down_proj_bias": "ffn_down_exps.bias",
    "fc1_latent_proj": "ffn_latent_down",
    "fc2_latent_proj": "ffn_latent_up",
}
_WITH_ONE_NORM_NAME = ("deepseek2", "dots1")
_OF_MAMBA2 = ("mamba2", "falcon-h1", "nemotron_h", "nemotron_h_moe")
_WITH_LAYER_INPUTS = ("gemma3n", "gemma4")
_OF_DELTAS = ("qwen3next", "qwen35", "qwen35moe")


def write_hybrid(
    folder: Path, file: Path, architecture: str, more: Mapping[str, Setting] | None = None
) -> Path:
    """Writes the model in `folder` to `file`, its tensors in float32."""
    return write(file, *hybrid_parts(folder, architecture, more))


def hybrid_parts(
    folder: Path, architecture: str, more: Mapping[str, Setting] | None = None
) -> tuple[dict[str, Setting], list[WrittenTensor]]:
    """The keys and the tensors of the file."""
    config = json.loads((folder / "config.json").read_text())
    keys = {**common_keys(config), **own_keys(architecture, config)}
    metadata: dict[str, Setting] = {
        "general.architecture": architecture,
        **{f"{architecture}.{key}": value for key, value in keys.items()},
        "tokenizer.ggml.eos_token_id": 2,
        **(more or {}),
    }
    tensors = load_file(folder / "model.safetensors")
    if architecture not in ("gpt-oss", "gemma4"):
        tensors = split_experts(tensors)
    written: dict[str, np.ndarray] = {}
    if architecture in _WITH_LAYER_INPUTS:
        written, tensors = _gemma_parts(architecture, config, tensors)
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in sorted(tensors.items()):
        values = tensor.float().numpy()
        if match := re.fullmatch(r".*layers\.(\d+)\..*\.experts\.(\d+)\.(\w+)\.weight", name):
            target = f"blk.{match[1]}.{_PARTS[match[3]]}_exps.weight"
            stacks.setdefault(target, {})[int(match[2])] = values
            continue
        written |= dict(_converted(architecture, config, name, values))
    stacked = {name: np.stack([s[i] for i in range(len(s))]) for name, s in stacks.items()}
    return metadata, [floats(*named) for named in {**written, **stacked}.items()]


def _gemma_parts(
    architecture: str, config: Config, tensors: Mapping[str, Any]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """What Gemma 3n and 4 have alone, written; and the tensors that are left."""
    plain = {name: tensor.float().numpy() for name, tensor in tensors.items()}
    written = dict(stream_stacks(plain))
    if architecture == "gemma4":
        written["rope_freqs.weight"] = wave_factors(config)
    left = {name: tensor for name, tensor in tensors.items() if ".altup_" not in name}
    for name in list(left):
        if (target := gemma_target(name)) is not None:
            written[target] = plain[name]
            del left[name]
    return written, left


def _converted(architecture: str, config: Config, name: str, values: np.ndarray) -> Named:
    if name in _ENDS:
        yield _ENDS[name], _numbers(architecture, config, name, _ENDS[name], values)
        return
    match = re.fullmatch(r"(?:model|backbone)\.layers\.(\d+)\.(.*)", name)
    assert match is not None, name
    there, inside = f"blk.{match[1]}.", match[2]
    if inside.endswith("in_proj_qkvz.weight"):
        yield from _by_role(config, there, values)
    elif inside.endswith("kv_b_proj.weight"):
        yield from _latent_halves(config, there, values)
    elif inside.startswith("mlp.experts.") and architecture == "gpt-oss":
        yield from _gpt_oss_experts(there, inside, values)
    else:
        target = there + _target(architecture, inside)
        yield target, _numbers(architecture, config, inside, target, values)


def _target(architecture: str, inside: str) -> str:
    stem, _, ending = inside.rpartition(".")
    if ending not in ("weight", "bias"):
        return _PARTS[ending]
    part = stem.rpartition(".")[2]
    if architecture == "falcon-h1" and part == "pre_ff_layernorm":
        return "ffn_norm"
    if part == "post_attention_layernorm" and architecture in _WITH_ONE_NORM_NAME:
        return f"ffn_norm.{ending}"
    if stem.endswith("self_attn.out_proj"):
        return f"attn_output.{ending}"
    if stem.startswith("conv."):
        return f"shortconv.{part}.{ending}"
    if part == "norm" and "." in stem:
        return f"ssm_norm.{ending}"
    if "shared_expert" in stem and part.endswith("_proj"):
        return f"{_PARTS[part]}_shexp.{ending}"
    return f"{_PARTS[part]}.{ending}"


def _numbers(
    architecture: str, config: Config, name: str, target: str, values: np.ndarray
) -> np.ndarray:
    if architecture == "falcon-h1":
        values = values * _multiplier(config, name, values)
    if architecture in ("qwen35", "qwen35moe") and name.startswith("linear_attn."):
        values = _tiled(config, name, values)
    if architecture.startswith("nemotron") and target.endswith(("attn_q.weight", "attn_k.weight")):
        heads = config["num_attention_heads" if "attn_q" in target else "num_key_value_heads"]
        by_half = values.reshape(heads, 2, -1, values.shape[1])
        values = by_half.swapaxes(1, 2).reshape(values.shape)
    if target.endswith("ssm_a"):
        values = -np.exp(values)
    if architecture in _OF_DELTAS and target.endswith("norm.weight") and "ssm" not in target:
        values = values + np.float32(1)
    if target.endswith(("ssm_conv1d.weight", "shortconv.conv.weight")):
        values = values[:, 0]
    if architecture in _OF_MAMBA2 and target.endswith(("ssm_a", "ssm_d")):
        values = values[:, None]
    if architecture in _OF_MAMBA2 and target.endswith("ssm_norm.weight"):
        groups = config.get("n_groups") or config["mamba_n_groups"]
        values = values.reshape(groups, -1)
    return values


def _multiplier(config: Config, name: str, values: np.ndarray) -> Any:
    """The factors that Falcon-H1 has at run time in its folder."""
    gate, down = config["mlp_multipliers"]
    attention = config["attention_in_multiplier"]
    factors = {
        "embed_tokens": config["embedding_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "down_proj": down,
        "gate_proj": gate,
        "k_proj": config["key_multiplier"] * attention,
        "q_proj": attention,
        "v_proj": attention,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
    }
    if "mamba.in_proj" in name:
        inner, group = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        sizes = (inner, inner, group, group, len(values) - 2 * (inner + group))
        parts = np.repeat(np.array(config["ssm_multipliers"], "f4"), sizes)
        return parts[:, None] * np.float32(config["ssm_in_multiplier"])
    return np.float32(next((f for part, f in factors.items() if part in name), 1.0))


def _tiled(config: Config, name: str, values: np.ndarray) -> np.ndarray:
    """Value heads of Qwen3.5 by their number within a key head."""
    k_heads, v_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    k_dim, v_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]

    def tiles(rows: np.ndarray) -> np.ndarray:
        by_head = rows.reshape(k_heads, v_heads // k_heads, -1, *rows.shape[1:])
        return by_head.swapaxes(0, 1).reshape(rows.shape)

    if "out_proj" in name:
        return tiles(values.T).T
    if "in_proj_qkv" in name or "conv1d" in name:
        before = 2 * k_heads * k_dim
        assert len(values) == before + v_heads * v_dim
        return np.concatenate([values[:before], tiles(values[before:])])
    return values if name == "linear_attn.norm.weight" else tiles(values)


def _by_role(config: Config, there: str, values: np.ndarray) -> Named:
    k_heads, k_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    of_values = config["linear_num_value_heads"] // k_heads * config["linear_value_head_dim"]
    by_head = values.reshape(k_heads, -1, values.shape[1])
    cuts = np.cumsum([k_dim, k_dim, of_values])
    q, k, v, z = (p.reshape(-1, values.shape[1]) for p in np.split(by_head, cuts, axis=1))
    yield f"{there}attn_qkv.weight", np.concatenate([q, k, v])
    yield f"{there}attn_gate.weight", z


def _latent_halves(config: Config, there: str, values: np.ndarray) -> Named:
    heads, plain = config["num_attention_heads"], config["qk_nope_head_dim"]
    by_head = values.reshape(heads, plain + config["v_head_dim"], -1)
    yield f"{there}attn_k_b.weight", np.ascontiguousarray(by_head[:, :plain].swapaxes(1, 2))
    yield f"{there}attn_v_b.weight", np.ascontiguousarray(by_head[:, plain:])


def _gpt_oss_experts(there: str, inside: str, values: np.ndarray) -> Named:
    part = inside.removeprefix("mlp.experts.")
    if part == "down_proj_bias":
        yield f"{there}ffn_down_exps.bias", values
    elif part == "down_proj":
        yield f"{there}ffn_down_exps.weight", np.ascontiguousarray(values.swapaxes(1, 2))
    else:
        ending = "bias" if part.endswith("_bias") else "weight"
        rows = values if ending == "bias" else values.swapaxes(1, 2)
        yield f"{there}ffn_gate_exps.{ending}", np.ascontiguousarray(rows[:, ::2])
        yield f"{there}ffn_up_exps.{ending}", np.ascontiguousarray(rows[:, 1::2])
