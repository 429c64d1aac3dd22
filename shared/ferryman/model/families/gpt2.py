"""GPT-2: learned positions, norms around the mean, an MLP without a gate, a tied head.

Its checkpoints have the weights of products transposed, [inputs, outputs] ("Conv1D").
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from ferryman.cache.manifest import StateManifest
from ferryman.model.layers.centred_norm import load_layer_norm
from ferryman.model.layers.decoder import Decoder
from ferryman.model.layers.decoder_layers import FeedForward
from ferryman.model.layers.learned_positions import LearnedPositionsLayer
from ferryman.model.layers.mlp import load_ungated_mlp
from ferryman.model.layers.transformer import TransformerConfig, load_transformer
from ferryman.model.readers.config_readers import (
    check_activation,
    check_flags,
    read_attention,
    read_trunk,
)
from ferryman.model.shapes.attention_shapes import AttentionShape, NoPositions
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import FeedForwardShape, MlpShape
from ferryman.model.weights.matrix import Matrix
from ferryman.model.weights.named_weights import STORED_FLOATS, WeightFormat, Weights
from ferryman_kernels.elementwise.activations import gelu_tanh

ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh")
"""Two names of the gelu by a tanh."""

FORMER_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
}
NAMES = {
    "model": "transformer",
    "layers": "h",
    "embed_tokens": "wte",
    "norm": "ln_f",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn": "attn",
    "qkv_proj": "c_attn",
    "o_proj": "c_proj",
}
UP_DOWN = ("c_fc", "c_proj")
TRANSPOSED = tuple(f"{name}.weight" for name in ("qkv_proj", "o_proj", *UP_DOWN))


def read_gpt2(config: ConfigFields) -> TransformerConfig:
    """GPT-2: learned positions, norms around the mean, an MLP without a gate, a tied head."""
    fields = config.with_former(**FORMER_NAMES).with_defaults(tie_word_embeddings=True)
    check_activation(fields, "activation_function", ACTIVATIONS)
    check_flags(fields, add_cross_attention=False)
    trunk = read_trunk(fields, norm_eps="layer_norm_epsilon")
    mlp = MlpShape(fields.whole("intermediate_size", 4 * trunk.hidden_dim), has_bias=True)
    attention = tuple(_attention(fields, layer) for layer in range(trunk.num_layers))
    return TransformerConfig(trunk, attention, (mlp,) * trunk.num_layers)


def _attention(fields: ConfigFields, layer: int) -> AttentionShape:
    """Scores are scaled by the size of a head, and in some models by the number of the layer."""
    shape = read_attention(fields, 1.0, NoPositions())
    scale = shape.head_dim**-0.5 if fields.flag("scale_attn_weights", True) else 1.0
    if fields.flag("scale_attn_by_inverse_layer_idx", False):
        scale /= layer + 1
    return replace(shape, scale=scale, has_bias=True, has_out_bias=True)


@dataclass(frozen=True, slots=True)
class TransposedFormat(WeightFormat):
    """The weights of `TRANSPOSED` as their transposes; all others as `inner` has them."""

    inner: WeightFormat

    def in_codes(self, weights: Weights, name: str, rows: int, columns: int) -> Matrix | None:
        if name not in TRANSPOSED:
            return self.inner.in_codes(weights, name, rows, columns)
        codes = self.inner.transposed_in_codes(weights, name, rows, columns)
        if codes is not None:
            return codes
        stored = weights.stored(name, (columns, rows), STORED_FLOATS)
        return self.inner.of_floats(stored.T, weights.dtype, weights.device)


def load_gpt2(config: TransformerConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    weights = _with_prefix(weights).called(NAMES)
    weights = replace(weights, format=TransposedFormat(weights.format))
    load = partial(load_transformer, feed_forward=_load_mlp, load_norm=load_layer_norm)
    decoder = load(config, manifest, weights)
    size = config.trunk.max_positions, config.trunk.hidden_dim
    table = weights.tensor("model.wpe.weight", *size)
    first, *others = decoder.layers
    return replace(decoder, layers=(LearnedPositionsLayer(table, first), *others))


def _load_mlp(weights: Weights, shape: FeedForwardShape, hidden_dim: int) -> FeedForward:
    if not isinstance(shape, MlpShape):
        raise TypeError(f"GPT-2 has no experts, but {shape}")
    return load_ungated_mlp(weights.under("mlp"), shape, hidden_dim, gelu_tanh, UP_DOWN)


def _with_prefix(weights: Weights) -> Weights:
    """Adds the names that transformers gives today: the first checkpoints lack their prefix."""
    checkpoint = weights.checkpoint
    longer = {f"transformer.{name}": stored for name, stored in checkpoint.tensors.items()}
    tensors = {**longer, **checkpoint.tensors}
    return replace(weights, checkpoint=replace(checkpoint, tensors=tensors))
