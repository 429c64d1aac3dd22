"""The native family: any mix per layer of attention, windows, Mamba-2 and gated delta nets.

No such model is published. It has state of all kinds at once, for tests and for the demo.

    hidden += Σ mixer(norm(hidden))       the mixers of the layer, side by side
    hidden += mlp(norm(hidden))

In `layer_types` a layer is one word, or several joined by "+": "sliding_attention+mamba".
"linear_attention" is a delta net with the tensors of Qwen3.5's, its norms stored plainly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from ferryman.cache.manifest import StateManifest
from ferryman.model.layers.decoder import Decoder, EndScales, load_model_decoder
from ferryman.model.layers.decoder_layers import DecoderLayer, LayerPlace, load_decoder_layer
from ferryman.model.layers.mixers import MixerShape, Parallel, load_mixer
from ferryman.model.layers.mlp import load_gated_mlp
from ferryman.model.readers.config_readers import (
    check_activation,
    read_delta,
    read_mamba,
    read_mlp,
    read_trunk,
)
from ferryman.model.readers.transformer_readers import read_rotary_attention
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.delta_shapes import DeltaLayout
from ferryman.model.shapes.feed_forward_shapes import MlpShape
from ferryman.model.shapes.model_shapes import TrunkShape
from ferryman.model.weights.named_weights import Weights

# A layer has one set of pages, and one recurrent state.
_EITHER_OR = ({"full_attention", "sliding_attention"}, {"mamba", "linear_attention"})


@dataclass(frozen=True, slots=True)
class NativeConfig:
    """The mixers of each layer, and one MLP shape for all."""

    trunk: TrunkShape
    states: tuple[tuple[MixerShape, ...], ...]
    mlp: MlpShape


def read_native(fields: ConfigFields) -> NativeConfig:
    check_activation(fields)
    return NativeConfig(read_trunk(fields), _states(fields), read_mlp(fields))


def _states(fields: ConfigFields) -> tuple[tuple[MixerShape, ...], ...]:
    layers = [word.split("+") for word in fields.words("layer_types")]
    shapes = _shapes(fields, {word for words in layers for word in words})
    if len(layers) != fields.whole("num_hidden_layers") or any(
        word not in shapes or words.count(word) > 1 for words in layers for word in words
    ):
        expected = f"num_hidden_layers of {', '.join(shapes)}, or of several joined by '+'"
        raise fields.refusal("layer_types", expected)
    for pair in _EITHER_OR:
        if any(pair <= set(words) for words in layers):
            raise fields.refusal(
                "layer_types", f"such that no layer has both {' and '.join(sorted(pair))}"
            )
    return tuple(tuple(shapes[word] for word in words) for words in layers)


def _shapes(fields: ConfigFields, words: set[str]) -> Mapping[str, MixerShape]:
    """The shapes of the mixers that `words` name, by word."""
    full = read_rotary_attention(fields)
    shapes: dict[str, MixerShape] = {"full_attention": full}
    if "sliding_attention" in words:
        shapes["sliding_attention"] = replace(full, window_len=fields.whole("sliding_window"))
    if "mamba" in words:
        shapes["mamba"] = read_mamba(fields)
    if "linear_attention" in words:
        shapes["linear_attention"] = read_delta(fields, DeltaLayout.BY_ROLE)
    return shapes


def load_native(config: NativeConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    return load_model_decoder(config, manifest, weights, partial(_layer, config), EndScales())


def _layer(config: NativeConfig, weights: Weights, place: LayerPlace) -> DecoderLayer:
    mixers = tuple(load_mixer(weights, shape, place) for shape in config.states[place.layer])
    mlp = load_gated_mlp(weights.under("mlp"), config.mlp, place.hidden_dim)
    return load_decoder_layer(weights, place, Parallel(mixers), mlp)
