"""Apertus: Llama with normed heads, and an MLP of xIELU without a gate.

xielu(x) = α₊ x² + β x                        for x > 0
           α₋ (exp(min(x, ε)) - 1 - x) + β x  else               (Huang and Schlag 2024)

α₊ and α₋ are softplus of two numbers of the layer, α₋ with β more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ferryman.cache.manifest import StateManifest
from ferryman.model.family import Family
from ferryman.model.layers.decoder import Decoder
from ferryman.model.layers.decoder_layers import FeedForward
from ferryman.model.layers.transformer import TransformerConfig, load_transformer
from ferryman.model.layers.ungated_mlp import load_ungated_mlp
from ferryman.model.readers.config_readers import check_activation, read_trunk
from ferryman.model.readers.transformer_readers import read_plain_mlp, read_rotary_attention
from ferryman.model.shapes.attention_shapes import HeadNorm
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import FeedForwardShape, MlpShape
from ferryman.model.weights.named_weights import Weights

EXPECTED = {"mlp_bias": False, "qk_norm": True, "post_norm": False}
"""Fields of the published configs that transformers does not know; other values are refused."""


def _read(fields: ConfigFields) -> TransformerConfig:
    check_activation(fields, known_as=("xielu",))
    for name, value in EXPECTED.items():
        if fields.flag(name, value) is not value:
            raise fields.refusal(name, str(value).lower())
    trunk = read_trunk(fields)
    attention = replace(read_rotary_attention(fields), head_norm=HeadNorm.EACH_HEAD)
    return TransformerConfig(
        trunk,
        attention=(attention,) * trunk.num_layers,
        feed_forwards=(read_plain_mlp(fields),) * trunk.num_layers,
    )


@dataclass(frozen=True, slots=True)
class Xielu:
    """The activation; `above` and `below` are α₊ and α₋, all in the model's dtype."""

    above: Tensor
    below: Tensor
    slope: Tensor
    largest: Tensor

    def __call__(self, hidden: Tensor) -> Tensor:
        bent = torch.where(
            hidden > 0,
            self.above * hidden.square(),
            (torch.expm1(torch.minimum(hidden, self.largest)) - hidden) * self.below,
        )
        return bent + self.slope * hidden


def _load_xielu(weights: Weights) -> Xielu:
    slope = weights.precise("beta")
    above, below = (F.softplus(weights.precise(name, 1)) for name in ("alpha_p", "alpha_n"))
    dtype = weights.dtype
    return Xielu(above.to(dtype), (slope + below).to(dtype), slope.to(dtype), weights.tensor("eps"))


def _feed_forward(weights: Weights, shape: FeedForwardShape, hidden_dim: int) -> FeedForward:
    if not isinstance(shape, MlpShape):
        raise TypeError(f"Apertus has no experts, but {shape}")
    under = weights.under("mlp")
    return load_ungated_mlp(under, shape, hidden_dim, _load_xielu(under.under("act_fn")))


def _load(config: TransformerConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    names = {
        "input_layernorm": "attention_layernorm",
        "post_attention_layernorm": "feedforward_layernorm",
    }
    load = partial(load_transformer, feed_forward=_feed_forward)
    return load(config, manifest, weights.called(names))


FAMILY = Family(("ApertusForCausalLM",), _read, _load)
