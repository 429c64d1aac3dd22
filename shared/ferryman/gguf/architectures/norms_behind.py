"""OLMo 2 and 3 and EXAONE 4: norms behind attention and MLP, and none before them.

    source   conversion/olmo.py, conversion/exaone.py, src/models/olmo2.cpp and exaone4.cpp of
             llama.cpp

OLMo 3 has the name of OLMo 2 and windows. Released EXAONE 4 of 64 layers has windows, too.
"""

from __future__ import annotations

from ferryman.gguf.architectures.config_fields import Fields, by_layer, window_kinds
from ferryman.gguf.architectures.tensor_names import ATTENTION, ENDS, TensorNames, mlp_names
from ferryman.gguf.architectures.transformer import dense_fields
from ferryman.gguf.model_file import GgufFile

_NORMS = {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
_PERIOD = 4
"""Every so many layers one has no window, where a file has no pattern."""
_WINDOW = "{arch}.attention.sliding_window"


def names(model: GgufFile) -> TensorNames:
    return TensorNames(ENDS, {**_NORMS, **ATTENTION, **mlp_names()})


def olmo2_fields(model: GgufFile) -> Fields:
    if not model.metadata.whole(_WINDOW, 0):
        return dense_fields(model, "Olmo2ForCausalLM")
    return {**dense_fields(model, "Olmo3ForCausalLM"), **_windows(model)}


def exaone4_fields(model: GgufFile) -> Fields:
    fields = dense_fields(model, "Exaone4ForCausalLM")
    return {**fields, **(_windows(model) if model.metadata.whole(_WINDOW, 0) else {})}


def _windows(model: GgufFile) -> Fields:
    """Layers with and without windows, whose rotations have one base."""
    metadata, near = model.metadata, "{arch}.rope.freq_base_swa"
    base = metadata.number("{arch}.rope.freq_base", 10_000.0)
    if metadata.number(near, base) != base:
        raise metadata.refusal(near, f"{base}, as that of layers without a window")
    return {
        "sliding_window": metadata.whole(_WINDOW),
        "layer_types": window_kinds(_flags(model)),
    }


def _flags(model: GgufFile) -> list[int]:
    metadata, key = model.metadata, f"{_WINDOW}_pattern"
    if not metadata.has(key):
        return [(layer + 1) % _PERIOD for layer in range(metadata.num_layers)]
    flags = by_layer(model, key)
    if set(flags) - {0, 1}:
        raise metadata.refusal(key, "an array of flags")
    return flags
