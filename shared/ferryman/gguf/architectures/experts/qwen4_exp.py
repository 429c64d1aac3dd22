"""Qwen 4 Exp: delta nets, attention to blocks that an index chooses, mixed streams, n-grams.

    source   conversion/qwen4exp.py and src/models/qwen4exp.cpp of llama.cpp

The table of n-grams is one tensor outside its layer. The numbers of its hashes are arrays of the
metadata, which the folder has as tensors.
"""

from __future__ import annotations

from dataclasses import replace

from ferryman.gguf.architectures.config_fields import Fields, by_layer, end_token_ids
from ferryman.gguf.architectures.delta_nets import (
    hybrid_fields,
    qwen3_5_names,
    shared_moe_fields,
)
from ferryman.gguf.architectures.tensor_names import TensorNames
from ferryman.gguf.model_file import GgufFile

_TABLE = "per_layer_token_embd.weight"
_LAYERS = "{arch}.ple.layers"
_SIZES = "{arch}.ple.head_vocab_sizes"
_HASHES = {
    "{arch}.ple.layer_multipliers": "layer_multipliers",
    "{arch}.ple.head_offsets": "ngram_heads_offsets",
    _SIZES: "ngram_heads_vocab_sizes",
}
_MIXER = {
    "norm": "hc_norm",
    "down": "input_mix_weight_down",
    "up": "input_mix_weight_up",
    "inject": "block_inject_weight",
}
_STREAMS = {
    f"hc_{there}_{part}.weight": f"{here}_hyper_connection.{name}.weight"
    for there, here in {"attn": "attn", "ffn": "mlp"}.items()
    for part, name in _MIXER.items()
}
_NGRAMS = {
    "ple_key.weight": "ple.key_proj.weight",
    "ple_value.weight": "ple.value_proj.weight",
    **{f"ple_norm_{part}.weight": f"ple.norm_{part}.weight" for part in ("key", "query", "conv")},
    "ple_conv1d.weight": "ple.conv1d.weight",
}
_INDEXER = {
    f"indexer.{part}_norm.weight": f"self_attn.indexer.{part}_layernorm.weight" for part in "qk"
}


def qwen4_exp_names(model: GgufFile) -> TensorNames:
    """Qwen 3.5's, with mixers of streams in place of norms."""
    names = qwen3_5_names(model)
    ends = {
        f"output_hc_{part}.weight": f"model.hyper_connection_mixer.{name}.weight"
        for part, name in _MIXER.items()
    }
    under = [f"model.layers.{layer}.ple.ple_embedding" for layer in _ngram_layers(model)]
    for place in under:
        ends[_TABLE] = f"{place}.ngram_embedding.weight"
    rows = ("indexer.q_proj.weight", "indexer.k_proj.weight")
    return replace(
        names,
        ends={**names.ends, **ends},
        layer={**names.layer, **_STREAMS, **_NGRAMS, **_INDEXER},
        joined={rows: "self_attn.indexer.index_qk_proj.weight"},
        convolutions=(*names.convolutions, "ple.conv1d.weight"),
        arrays={key: f"{place}.{name}" for place in under for key, name in _HASHES.items()},
    )


def qwen4_exp_fields(model: GgufFile) -> Fields:
    """Gates of delta nets are sigmoids, and shares of experts sum to 1, as llama.cpp computes
    them."""
    metadata = model.metadata
    return {
        **hybrid_fields(model),
        **shared_moe_fields(model),
        "architectures": ["Qwen4ExpForCausalLM"],
        "output_gate_type": "sigmoid",
        "hc_count": metadata.whole("{arch}.hyper_connection.count"),
        "hc_lowrank": metadata.whole("{arch}.hyper_connection.low_rank"),
        "indexer_n_heads": metadata.whole("{arch}.attention.indexer.head_count"),
        "indexer_kv_heads": 1,
        "indexer_head_dim": metadata.whole("{arch}.attention.indexer.key_length"),
        "indexer_budget": metadata.whole("{arch}.attention.indexer.top_k"),
        "indexer_compress_ratio": _block_len(model),
        "ple_layer_ids": [layer + 1 for layer in _ngram_layers(model)],
        **(_ngram_fields(model) if _ngram_layers(model) else {}),
    }


def _block_len(model: GgufFile) -> int:
    """The positions that share an index key; layers without an index have 0."""
    key = "{arch}.attention.compress_ratios"
    lengths = set(by_layer(model, key)) - {0}
    if len(lengths) != 1:
        raise model.metadata.refusal(key, "0 or one number, alike in all layers of attention")
    return lengths.pop()


def _ngram_layers(model: GgufFile) -> list[int]:
    """The layer that looks up n-grams, if there is any."""
    if not model.metadata.has(_LAYERS):
        return []
    layers = model.metadata.wholes(_LAYERS)
    if len(layers) > 1:
        raise model.metadata.refusal(_LAYERS, "one layer, of which the file has the table")
    return layers


def _ngram_fields(model: GgufFile) -> Fields:
    """Tables have the next prime numbers of rows from a least one on, which is that of the first;
    the tensor says to how many they are padded."""
    metadata, table = model.metadata, model.tensors.get(_TABLE)
    sizes = metadata.wholes(_SIZES)
    if table is None or not sizes:
        raise metadata.refusal(_LAYERS, f"left out without {_TABLE} and {_SIZES}")
    order, heads = (
        metadata.whole(f"{{arch}}.ple.{name}") for name in ("ngram_size", "heads_per_ngram")
    )
    separator = metadata.whole("{arch}.ple.eos_token_id")
    ends = [token for token in end_token_ids(model) if token != separator]
    return {
        # N-grams begin anew behind the first of them.
        "eos_token_id": [separator, *ends],
        "ngram_size": order,
        "heads_per_ngram": heads,
        "ple_embed_dim": table.shape[-1] * (order - 1) * heads,
        "ple_conv_kernel_size": metadata.whole("{arch}.ple.conv_kernel"),
        "ngram_vocab_size_base": sizes[0],
        "make_ngram_vocab_size_divisible_by": table.shape[0],
        "split_ngram_parts": 1,
    }
