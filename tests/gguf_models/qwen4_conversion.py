"""Qwen 4 Exp as a GGUF file, by a second reading of llama.cpp's converter: delta nets and experts
are those of Qwen 3.5.

    source   conversion/qwen4exp.py of the tree in llama-cpp-python 0.3.36

Nothing is shared with what is tested. That converter itself wrote the same tensors and keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import numpy as np
from tests.gguf_models.files import wide_array
from tests.gguf_models.hybrid_conversion import _converted as qwen3_5_converted
from tests.gguf_models.hybrid_keys import Config, common_keys, own_keys
from tools.bench.gguf.container import Setting

Tensors = Mapping[str, np.ndarray]

_MIXER = {
    "hc_norm": "norm",
    "input_mix_weight_down": "down",
    "input_mix_weight_up": "up",
    "block_inject_weight": "inject",
}
_NAMES = {
    **{f"hyper_connection_mixer.{name}": f"output_hc_{part}" for name, part in _MIXER.items()},
    **{f"attn_hyper_connection.{name}": f"hc_attn_{part}" for name, part in _MIXER.items()},
    **{f"mlp_hyper_connection.{name}": f"hc_ffn_{part}" for name, part in _MIXER.items()},
    **{f"self_attn.indexer.{part}_layernorm": f"indexer.{part}_norm" for part in "qk"},
    **{f"ple.norm_{part}": f"ple_norm_{part}" for part in ("key", "query", "conv")},
    "ple.key_proj": "ple_key",
    "ple.value_proj": "ple_value",
    "ple.conv1d": "ple_conv1d",
}
_HASHES = {
    "layer_multipliers": "layer_multipliers",
    "ngram_heads_offsets": "head_offsets",
    "ngram_heads_vocab_sizes": "head_vocab_sizes",
}
_PLACE = re.compile(r"model\.(?:layers\.(\d+)\.)?(.*)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(\w+)_proj\.weight")


def qwen4_tensors(config: Config, tensors: Tensors) -> dict[str, np.ndarray]:
    """The tensors of the file by name."""
    written = dict[str, np.ndarray]()
    stacks = dict[str, dict[int, np.ndarray]]()
    for name, values in tensors.items():
        match = _PLACE.fullmatch(name)
        layer, path = match.groups() if match else (None, name)
        under = "" if layer is None else f"blk.{layer}."
        if expert := _EXPERT.fullmatch(path):
            stack = stacks.setdefault(f"{under}ffn_{expert[2]}_exps.weight", {})
            stack[int(expert[1])] = values
        elif shard := re.search(r"ngram_embedding\.shard_(\d+)\.", path):
            stacks.setdefault("shards", {})[int(shard[1])] = values
        elif "ple_embedding" not in path:
            written |= dict(_converted(config, name, path, under, values))
    shards = stacks.pop("shards", {})
    if shards:
        written["per_layer_token_embd.weight"] = np.concatenate(_in_order(shards))
    return written | {name: np.stack(_in_order(stack)) for name, stack in stacks.items()}


def _converted(
    config: Config, name: str, path: str, under: str, values: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    module = path.removesuffix(".weight")
    if module.endswith("index_qk_proj"):
        rows = config["indexer_n_heads"] * config["indexer_head_dim"]
        yield f"{under}indexer.q_proj.weight", values[:rows]
        yield f"{under}indexer.k_proj.weight", values[rows:]
    elif module not in _NAMES:
        yield from qwen3_5_converted("qwen35moe", config, name, values)
    else:
        target = _NAMES[module]
        values = values + np.float32(1) if "norm" in target else values
        yield f"{under}{target}.weight", values[:, 0] if target == "ple_conv1d" else values


def _in_order(stack: Mapping[int, np.ndarray]) -> list[np.ndarray]:
    return [stack[index] for index in range(len(stack))]


def qwen4_keys(config: Config) -> Iterator[tuple[str, Setting]]:
    """The keys without the architecture's name before them. Layers are counted from 0."""
    yield from common_keys(config).items()
    yield from own_keys("qwen35moe", config).items()
    yield "hyper_connection.count", config["hc_count"]
    yield "hyper_connection.low_rank", config["hc_lowrank"]
    yield "attention.indexer.head_count", config["indexer_n_heads"]
    yield "attention.indexer.key_length", config["indexer_head_dim"]
    yield "attention.indexer.top_k", config["indexer_budget"]
    length, kinds = config["indexer_compress_ratio"], config["layer_types"]
    ratios = [0 if kind == "linear_attention" else length for kind in kinds]
    yield "attention.compress_ratios", ratios
    if not config["ple_layer_ids"]:
        return
    yield "ple.layers", [number - 1 for number in config["ple_layer_ids"]]
    yield "ple.ngram_size", config["ngram_size"]
    yield "ple.heads_per_ngram", config["heads_per_ngram"]
    yield "ple.conv_kernel", config["ple_conv_kernel_size"]
    yield "ple.eos_token_id", config["eos_token_id"]


def hash_keys(tensors: Tensors) -> dict[str, bytes]:
    """The numbers of the hashes, which are whole numbers of more than 32 bits."""
    by_name = {name.rpartition(".")[2]: values for name, values in tensors.items()}
    return {
        f"qwen4exp.ple.{key}": wide_array(by_name[name].tolist())
        for name, key in _HASHES.items()
        if name in by_name
    }
