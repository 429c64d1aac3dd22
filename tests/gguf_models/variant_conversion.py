"""Variants of Llama, GPT-2 and mixtures as GGUF files, by a second reading of the converter.

    source   convert_hf_to_gguf.py and conversion/*.py of the tree in llama-cpp-python 0.3.36

Nothing is shared with what is tested. That converter itself wrote the same tensors and keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file
from tests.gguf_models.files import WrittenTensor, floats, write
from tests.gguf_models.variant_keys import Config, variant_keys
from tools.bench.gguf.container import Setting

Named = Iterator[tuple[str, np.ndarray]]

_ENDS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "lm_head.bias": "output.bias",
    "model.norm.bias": "output_norm.bias",
    "model.word_embeddings.weight": "token_embd.weight",
    "transformer.wte.weight": "token_embd.weight",
    "transformer.wpe.weight": "position_embd.weight",
    "transformer.ln_f.weight": "output_norm.weight",
    "transformer.ln_f.bias": "output_norm.bias",
}
_SHARED = {
    f"{word}.{part}_proj": f"ffn_{part}_shexp"
    for word in ("shared_experts", "shared_expert", "shared_mlp")
    for part in ("gate", "up", "down")
}
_PARTS = {
    **_SHARED,
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "sinks": "attn_sinks.weight",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "w1": "ffn_gate",
    "w3": "ffn_up",
    "w2": "ffn_down",
    "gate": "ffn_gate_inp",
    "router": "ffn_gate_inp",
    "expert_bias": "exp_probs_b.bias",
    "e_score_correction_bias": "exp_probs_b.bias",
    "q_a_proj": "attn_q_a",
    "q_b_proj": "attn_q_b",
    "q_a_layernorm": "attn_q_a_norm",
    "kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "kv_a_layernorm": "attn_kv_a_norm",
    "kv_b_proj": "attn_kv_b",
    "indexer.wq_b": "indexer.attn_q_b",
    "indexer.wk": "indexer.attn_k",
    "indexer.k_norm": "indexer.k_norm",
    "indexer.weights_proj": "indexer.proj",
    "f_a_proj": "ssm_f_a",
    "f_b_proj": "ssm_f_b",
    "g_a_proj": "ssm_g_a",
    "g_b_proj": "ssm_g_b",
    "b_proj": "ssm_beta",
    "o_norm": "ssm_norm",
    "dt_bias": "ssm_dt.bias",
    "A_log": "ssm_a",
    "q_conv1d": "ssm_conv1d_q",
    "k_conv1d": "ssm_conv1d_k",
    "v_conv1d": "ssm_conv1d_v",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}
_OWN = {
    "apertus": {"attention_layernorm": "attn_norm", "feedforward_layernorm": "ffn_norm"},
    "laguna": {"g_proj": "attn_gate"},
    "step35": {"g_proj": "attn_gate"},
    "mimo2": {"attention_sink_bias": "attn_sinks.weight"},
    "bailingmoe3": {"dense": "attn_output", "f_proj": "ssm_f_a"},
    "afmoe": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_mlp_layernorm": "ffn_norm",
        "post_mlp_layernorm": "post_ffw_norm",
        "self_attn.gate_proj": "attn_gate",
    },
    "hy_v3": {"expert_bias": "exp_probs_b"},
    "minimax-01": {
        "qkv_proj": "attn_qkv",
        "output_gate": "attn_gate",
        "self_attn.norm": "attn_norm_2",
        "out_proj": "attn_output",
    },
    "minimax-m3": {
        f"indexer.{part}": f"indexer.{part}" for part in ("q_proj", "k_proj", "q_norm", "k_norm")
    },
    "chatglm": {"gate_up_proj": "ffn_up"},
    "gpt2": {
        "ln_1": "attn_norm",
        "ln_2": "ffn_norm",
        "c_attn": "attn_qkv",
        "attn.c_proj": "attn_output",
        "c_fc": "ffn_up",
        "mlp.c_proj": "ffn_down",
    },
}
_COMPUTED = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
"""Tensors that transformers 5.23 saves of MiniMax and that no published folder has."""
_PAIRED = ("arcee", "mistral3", "granite_swa")
_LAYER = re.compile(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.*)")
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")


def write_variant(folder: Path, file: Path, architecture: str) -> Path:
    """Writes the model in `folder` to `file`, its tensors in float32."""
    return write(file, *variant_parts(folder, architecture))


def variant_parts(
    folder: Path, architecture: str
) -> tuple[dict[str, Setting], list[WrittenTensor]]:
    """The keys and the tensors of the file."""
    config = json.loads((folder / "config.json").read_text())
    metadata: dict[str, Setting] = {
        "general.architecture": architecture,
        **{f"{architecture}.{key}": value for key, value in variant_keys(architecture, config)},
        "tokenizer.ggml.eos_token_id": 2,
    }
    tensors = load_file(folder / "model.safetensors")
    plain = {
        name: tensor.float().numpy()
        for name, tensor in tensors.items()
        if not name.endswith(_COMPUTED)
    }
    metadata |= _taken_as_keys(plain)
    if architecture == "step35":
        ones = np.float32(1)
        plain |= {name: plain[name] + ones for name in plain if name.endswith("norm.weight")}
    written = variant_tensors(architecture, config, plain)
    return metadata, [floats(*named) for named in written.items()]


def _taken_as_keys(tensors: dict[str, np.ndarray]) -> dict[str, Setting]:
    """The numbers of Apertus' activation, by layer, which are no tensors of the file."""
    names = [name for name in tensors if ".act_fn." in name]
    keys: dict[str, dict[int, float]] = {}
    for name in names:
        layer, _, key = name.removeprefix("model.layers.").partition(".mlp.act_fn.")
        keys.setdefault(f"xielu.{key}", {})[int(layer)] = float(tensors.pop(name).item())
    return {key: [numbers[i] for i in range(len(numbers))] for key, numbers in keys.items()}


def variant_tensors(
    architecture: str, config: Config, tensors: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The tensors of the file by name."""
    written: dict[str, np.ndarray] = dict(_waves(config))
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, values in sorted(tensors.items()):
        if name in _ENDS:
            is_around_one = architecture == "minimax-m3" and name == "model.norm.weight"
            written[_ENDS[name]] = values + 1 if is_around_one else values
            continue
        match = _LAYER.fullmatch(name)
        assert match is not None, name
        under, path = f"blk.{match[1]}.", match[2]
        if expert := _EXPERT.fullmatch(path):
            target = f"{under}{_PARTS[expert[2]]}_exps.weight"
            stacks.setdefault(target, {})[int(expert[1])] = values
            continue
        for target, changed in _converted(architecture, config, path, values):
            written[under + target] = changed
    stacked = {name: np.stack([s[i] for i in range(len(s))]) for name, s in stacks.items()}
    return {**written, **stacked}


def _waves(config: Config) -> Named:
    """The factors of waves for short and for long texts."""
    rope = config.get("rope_parameters") or {}
    for length in ("short", "long"):
        if f"{length}_factor" in rope:
            factors = np.array(rope[f"{length}_factor"], np.float32)
            yield f"rope_factors_{length}.weight", factors
    full = rope.get("full_attention", {})
    if full.get("rope_type") == "llama3":
        yield "rope_freqs.weight", _llama3_factors(full, config["head_dim"])


def _llama3_factors(rope: Mapping[str, Any], head_dim: int) -> np.ndarray:
    """The factors of the waves of the turning part, and ones up to those of a whole head."""
    turning = int(head_dim * rope["partial_rotary_factor"])
    waves = rope["rope_theta"] ** -(np.arange(0, turning, 2) / turning)
    turns = rope["original_max_position_embeddings"] * waves / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    factors = 1 / ((1 - kept) / rope["factor"] + kept)
    padded: np.ndarray = np.concatenate([factors, np.ones(head_dim // 2 - len(factors))])
    return padded.astype(np.float32)


def _converted(architecture: str, config: Config, path: str, values: np.ndarray) -> Named:
    """A tensor of a layer under its names in the file."""
    if path.endswith("kv_b_proj.weight") and architecture != "minicpm3":
        yield from _halves(config, values)
    elif architecture == "bailingmoe3" and path.endswith("g_proj.weight"):
        is_by_head = len(values) == config["num_attention_heads"]
        yield "attn_gate.weight" if is_by_head else "ssm_g_a.weight", values
    elif architecture == "step35" and path.endswith("experts.gate_up_proj"):
        gate, up = np.split(values, 2, axis=1)
        yield "ffn_gate_exps.weight", gate
        yield "ffn_up_exps.weight", up
    elif architecture == "minimax-m3" and "gate_up_proj" in path:
        yield from _minimax_m3_halves(path, values)
    elif architecture == "llama4" and ".experts." in path:
        yield from _llama4_experts(path, values)
    else:
        target = _target(architecture, path)
        yield target, _changed(architecture, config, path, target, values)


def _target(architecture: str, path: str) -> str:
    names = {**_PARTS, **_OWN.get(architecture, {})}
    parts = path.removesuffix(".gate.weight").split(".") if "router.gate" in path else []
    parts = [*parts, "weight"] if parts else path.split(".")
    kind = parts.pop() if parts[-1] in ("weight", "bias") else ""
    pair = ".".join(parts[-2:])
    target = names[pair] if pair in names else names[parts[-1]]
    return f"{target}.{kind}" if kind else target


def _changed(
    architecture: str, config: Config, path: str, target: str, values: np.ndarray
) -> np.ndarray:
    if architecture == "gpt2" and path.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return values.T
    if architecture in _PAIRED and re.match(r"attn_[qk]\.", target):
        heads = "num_attention_heads" if "attn_q" in target else "num_key_value_heads"
        by_half = values.reshape(config[heads], 2, -1, *values.shape[1:])
        return by_half.swapaxes(1, 2).reshape(values.shape)
    if architecture == "minimax-m3" and path.endswith("norm.weight"):
        return values + 1
    if path.endswith("A_log"):
        decays: np.ndarray = np.exp(values)
        return decays.reshape(-1, 1) if architecture == "bailingmoe3" else -decays
    if "conv1d" in path:
        return values.reshape(1, len(values), 1, values.shape[-1])
    return values


def _halves(config: Config, values: np.ndarray) -> Named:
    """Keys and values of latent attention; a head's keys have columns as rows."""
    heads, keys = config["num_attention_heads"], config["qk_nope_head_dim"]
    by_head = values.reshape(heads, -1, values.shape[-1])
    yield "attn_k_b.weight", np.ascontiguousarray(by_head[:, :keys].swapaxes(1, 2))
    yield "attn_v_b.weight", np.ascontiguousarray(by_head[:, keys:])


def _llama4_experts(path: str, values: np.ndarray) -> Named:
    """The folder has [experts, inputs, outputs], gate and up together."""
    rows = values.swapaxes(1, 2)
    if path.endswith("gate_up_proj"):
        gate, up = np.split(rows, 2, axis=1)
        yield "ffn_gate_exps.weight", gate
        yield "ffn_up_exps.weight", up
    else:
        yield "ffn_down_exps.weight", rows


def _minimax_m3_halves(path: str, values: np.ndarray) -> Named:
    """transformers 5.23 has gate and up together, which published folders have apart."""
    ending = "_exps" if ".experts." in path else "_shexp" if "shared_experts" in path else ""
    gate, up = np.split(values, 2, axis=-2)
    yield f"ffn_gate{ending}.weight", gate
    yield f"ffn_up{ending}.weight", up
