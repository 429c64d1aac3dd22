"""Fields of a Hugging Face config from the keys of a GGUF file, as many architectures have them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ferryman.gguf.architectures.tensor_names import ROPE_FREQS
from ferryman.gguf.model_file import GgufFile

Fields = dict[str, Any]

END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Keys of the vocabulary for tokens that end a generation."""

_FLOATS = {"F64": "float64", "F32": "float32"}
FULL_LAYER, WINDOW_LAYER = "full_attention", "sliding_attention"
_SCALINGS = ("none", "linear", "yarn")


def trunk_fields(model: GgufFile, *, eps: str = "rms_norm_eps") -> Fields:
    """Sizes and ends of a decoder. `eps` is the name of the norms' field in this config."""
    metadata = model.metadata
    return {
        "vocab_size": _vocab_size(model),
        "hidden_size": metadata.whole("{arch}.embedding_length"),
        "num_hidden_layers": metadata.num_layers,
        "max_position_embeddings": metadata.whole("{arch}.context_length"),
        eps: _epsilon(model),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "eos_token_id": end_token_ids(model),
        "dtype": stored_dtype(model),
    }


def _epsilon(model: GgufFile) -> float:
    """The norms' epsilon; in files of some models its key is that of another kind of norms."""
    metadata, plain = model.metadata, "{arch}.attention.layer_norm_epsilon"
    key = "{arch}.attention.layer_norm_rms_epsilon"
    return metadata.number(key if metadata.has(key) or not metadata.has(plain) else plain)


def end_token_ids(model: GgufFile) -> list[int]:
    """The token ids that end a generation."""
    keys = [f"tokenizer.ggml.{key}" for key in END_KEYS]
    return sorted({model.metadata.whole(key) for key in keys if model.metadata.has(key)})


def stored_dtype(model: GgufFile) -> str:
    """The dtype in which a file of floats was meant to run, by most of its numbers; bfloat16 for
    one in blocks."""
    sizes: dict[str, int] = {}
    for tensor in model.tensors.values():
        dtype = _FLOATS.get(tensor.kind.name, "bfloat16")
        sizes[dtype] = sizes.get(dtype, 0) + tensor.end - tensor.start
    return max(sizes, key=lambda dtype: sizes[dtype], default="bfloat16")


def attention_fields(model: GgufFile) -> Fields:
    """Rotary attention with grouped heads, of which every layer has as many."""
    metadata = model.metadata
    heads = _same_in_all(model, "{arch}.attention.head_count")
    hidden = metadata.whole("{arch}.embedding_length")
    head_dim = metadata.whole("{arch}.attention.key_length", hidden // max(heads, 1))
    if metadata.whole("{arch}.attention.value_length", head_dim) != head_dim:
        raise metadata.refusal("{arch}.attention.value_length", f"{head_dim}, as that of keys")
    kv_heads = "{arch}.attention.head_count_kv"
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": _same_in_all(model, kv_heads) if metadata.has(kv_heads) else heads,
        "head_dim": head_dim,
        "attention_bias": any_has(model, "attn_q.bias"),
        **rope_fields(model, head_dim),
    }


def rope_fields(model: GgufFile, head_dim: int) -> Fields:
    """Base, turning part and scaling. Raises ConfigError, by its name, for an unknown scaling."""
    metadata = model.metadata
    turning = metadata.whole("{arch}.rope.dimension_count", head_dim)
    if not 0 < turning <= head_dim:
        raise metadata.refusal("{arch}.rope.dimension_count", f"1 to {head_dim}")
    fields: Fields = {"rope_theta": metadata.number("{arch}.rope.freq_base", 10_000.0)}
    if turning != head_dim:
        fields["partial_rotary_factor"] = turning / head_dim
    if scaling := _scaling(model):
        fields["rope_scaling"] = scaling
    return fields


def _scaling(model: GgufFile) -> Mapping[str, Any]:
    metadata = model.metadata
    if ROPE_FREQS in model.tensors:
        # Llama 3.1's scaling, computed by the converter: a factor for each wave.
        factors = [float(factor) for factor in model.floats(ROPE_FREQS)]
        trained = metadata.whole("{arch}.context_length")
        return {
            "rope_type": "longrope",
            "long_factor": factors,
            "short_factor": factors,
            "original_max_position_embeddings": trained,
            "attention_factor": 1.0,
        }
    kind = metadata.text("{arch}.rope.scaling.type", "none")
    if kind not in _SCALINGS:
        raise metadata.refusal("{arch}.rope.scaling.type", f"one of {', '.join(_SCALINGS)}")
    factor = metadata.number("{arch}.rope.scaling.factor", 1.0)
    if kind == "none" or factor == 1.0:
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    return {"rope_type": "yarn", "factor": factor, **_yarn(model)}


def _yarn(model: GgufFile) -> Mapping[str, Any]:
    metadata = model.metadata
    grown = metadata.number("{arch}.rope.scaling.attn_factor", 1.0)
    if grown != 1.0:
        raise metadata.refusal("{arch}.rope.scaling.attn_factor", "1.0")
    trained = "{arch}.rope.scaling.original_context_length"
    return {
        **_growth(model),
        "original_max_position_embeddings": metadata.whole(trained),
        "beta_fast": metadata.number("{arch}.rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": metadata.number("{arch}.rope.scaling.yarn_beta_slow", 1.0),
    }


def _growth(model: GgufFile) -> Mapping[str, float]:
    """YaRN's growth of scores if the folder named another one than that of its formula."""
    key = "{arch}.rope.scaling.yarn_attn_factor"
    factor = model.metadata.number("{arch}.rope.scaling.factor", 1.0)
    # The reader of the fields refuses a factor that is not positive.
    if not model.metadata.has(key) or factor <= 0:
        return {}
    named = np.float32(model.metadata.number(key))
    by_formula = np.float32(0.1 * math.log(factor) + 1.0)
    return {} if named == by_formula else {"attention_factor": float(str(named))}


def expert_fields(model: GgufFile, *, count: str = "num_experts") -> Fields:
    """Routed experts; `count` is the name of their number in this config."""
    metadata = model.metadata
    return {
        count: metadata.whole("{arch}.expert_count"),
        "num_experts_per_tok": metadata.whole("{arch}.expert_used_count"),
    }


def any_has(model: GgufFile, ending: str) -> bool:
    """Whether any layer has a tensor of this name."""
    return any(name.endswith(f".{ending}") for name in model.tensors)


def inner_dim(model: GgufFile) -> int:
    """The channels within an MLP, of which every layer has as many."""
    return _same_in_all(model, "{arch}.feed_forward_length")


def _vocab_size(model: GgufFile) -> int:
    embedding = model.tensors.get("token_embd.weight")
    if embedding is None:
        raise model.metadata.refusal("{arch}.vocab_size", "given with a tensor token_embd.weight")
    return embedding.shape[0]


def window_flags(model: GgufFile, unsaid: list[bool] | None = None) -> list[bool]:
    """Whether each layer has a window, as the file says; `unsaid` if it may leave that out."""
    key = "{arch}.attention.sliding_window_pattern"
    if unsaid is not None and not model.metadata.has(key):
        return unsaid
    return list(map(bool, by_layer(model, key)))


def window_kinds(are_windows: Iterable[object]) -> list[str]:
    """The word of a config for each layer, true for those with a window."""
    return [WINDOW_LAYER if is_window else FULL_LAYER for is_window in are_windows]


def by_layer(model: GgufFile, key: str) -> list[int]:
    """A number or a flag for each layer of the model. Raises ConfigError for fewer."""
    values = model.metadata.wholes(key)
    if len(values) < model.metadata.num_layers:
        raise model.metadata.refusal(key, f"for each of {model.metadata.num_layers} layers")
    return values[: model.metadata.num_layers]


def _same_in_all(model: GgufFile, key: str) -> int:
    """A number that may be given for each layer; layers without any have 0."""
    values = set(by_layer(model, key)) - {0}
    if len(values) != 1:
        raise model.metadata.refusal(key, "alike in all layers")
    return values.pop()
