"""The text model in a folder whose model also reads images or sound.

Its config is the object "text_config", and its tensors have a longer prefix. Positions in text have
the same number on all axes, so rotary positions of several axes ("mrope") are plain ones there.
"""

from __future__ import annotations

from dataclasses import replace

from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.weights.named_weights import Weights

# The longer prefixes, and the names in a folder of the text model alone.
_PREFIXES = {"language_model.": "", "model.language_model.": "model."}


def text_fields(whole: ConfigFields) -> ConfigFields:
    """The fields of the text model, or those of the whole model if it has none."""
    return whole.merged_with("text_config")


def text_weights(weights: Weights) -> Weights:
    """Adds the short names of the text model's tensors."""
    renamed = {
        short + name.removeprefix(long): stored
        for name, stored in weights.checkpoint.tensors.items()
        for long, short in _PREFIXES.items()
        if name.startswith(long)
    }
    checkpoint = weights.checkpoint
    tensors = {**checkpoint.tensors, **renamed}
    return replace(weights, checkpoint=replace(checkpoint, tensors=tensors))
