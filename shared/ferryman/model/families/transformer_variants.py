"""Transformers whose parts around the attention are not Llama's: norms, their places, the MLP.

Norms go around the mean (StarCoder 2, StableLM), or serve attention and MLP at once (some
StableLM). MLPs have no gate (StarCoder 2, Apertus).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ferryman.cache.manifest import StateManifest
from ferryman.model.layers.centred_norm import load_layer_norm
from ferryman.model.layers.decoder import Decoder
from ferryman.model.layers.decoder_layers import FeedForward
from ferryman.model.layers.mlp import UP_DOWN, load_ungated_mlp
from ferryman.model.layers.transformer import (
    TransformerConfig,
    load_transformer,
    uniform_transformer,
)
from ferryman.model.readers.config_readers import GELU, check_activation, check_flags, read_trunk
from ferryman.model.readers.transformer_readers import (
    read_plain_mlp,
    read_rotary_attention,
    read_short_windows,
)
from ferryman.model.shapes.attention_shapes import HeadNorm
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import FeedForwardShape, MlpShape
from ferryman.model.shapes.model_shapes import NormPlaces
from ferryman.model.weights.named_weights import Weights
from ferryman_kernels.elementwise.activations import gelu_tanh

STARCODER2_DEFAULTS = {"tie_word_embeddings": True, "use_bias": True, "hidden_act": GELU}
"""The meaning of fields that a published config of StarCoder 2 leaves out."""

STABLELM_ROTARY_SHARE = 0.25
"""The part of a head that turns unless the config says so."""


def read_stablelm(fields: ConfigFields) -> TransformerConfig:
    """StableLM: norms around the mean, partly rotary heads, attention and MLP in turn or at once.

    In StableLM 2 12B each head of q and of k has a norm of its own.
    """
    check_activation(fields)
    trunk = read_trunk(fields, norm_eps="layer_norm_eps")
    is_side_by_side = fields.flag("use_parallel_residual", False)
    attention = replace(
        read_rotary_attention(fields, STABLELM_ROTARY_SHARE),
        has_bias=fields.flag("use_qkv_bias", False),
        has_out_bias=False,
        head_norm=HeadNorm.OWN_CENTRED if fields.flag("qk_layernorm", False) else HeadNorm.NONE,
    )
    return replace(
        uniform_transformer(trunk, attention, read_plain_mlp(fields)),
        norms=NormPlaces.SHARED if is_side_by_side else NormPlaces.BEFORE,
    )


load_stablelm = partial(load_transformer, load_norm=load_layer_norm)


def read_starcoder2(given: ConfigFields) -> TransformerConfig:
    """StarCoder 2: attention in windows, norms around the mean, an MLP without a gate."""
    fields = ConfigFields(given.source, {**STARCODER2_DEFAULTS, **given.raw})
    check_activation(fields, known_as=(GELU,))
    trunk = read_trunk(fields, norm_eps="norm_epsilon")
    has_bias = fields.flag("use_bias", True)
    full = replace(read_rotary_attention(fields), has_bias=has_bias, has_out_bias=has_bias)
    mlp = MlpShape(fields.whole("intermediate_size"), has_bias)
    return TransformerConfig(
        trunk,
        attention=read_short_windows(fields, full),
        feed_forwards=(mlp,) * trunk.num_layers,
    )


def _starcoder2_mlp(weights: Weights, shape: FeedForwardShape, hidden_dim: int) -> FeedForward:
    return _load_ungated(weights.under("mlp"), shape, hidden_dim, gelu_tanh, ("c_fc", "c_proj"))


def _load_ungated(
    weights: Weights,
    shape: FeedForwardShape,
    hidden_dim: int,
    act: Callable[[Tensor], Tensor],
    names: tuple[str, str] = UP_DOWN,
) -> FeedForward:
    if not isinstance(shape, MlpShape):
        raise TypeError(f"an MLP without a gate is no mixture, but {shape}")
    return load_ungated_mlp(weights, shape, hidden_dim, act, names)


load_starcoder2 = partial(load_transformer, feed_forward=_starcoder2_mlp, load_norm=load_layer_norm)


def read_apertus(fields: ConfigFields) -> TransformerConfig:
    """Apertus: Llama with normed heads, and an MLP of xIELU without a gate."""
    check_activation(fields, known_as=("xielu",))
    # transformers does not know these fields of the published configs.
    check_flags(fields, mlp_bias=False, qk_norm=True, post_norm=False)
    attention = replace(read_rotary_attention(fields), head_norm=HeadNorm.EACH_HEAD)
    return uniform_transformer(read_trunk(fields), attention, read_plain_mlp(fields))


@dataclass(frozen=True, slots=True)
class Xielu:
    """The activation of Apertus (Huang and Schlag 2024).

    xielu(x) = α₊ x² + β x                        for x > 0
               α₋ (exp(min(x, ε)) - 1 - x) + β x  else

    α₊ and α₋, here `above` and `below`, are softplus of two numbers of the layer, α₋ with β more.
    All are in the model's dtype.
    """

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


def _apertus_mlp(weights: Weights, shape: FeedForwardShape, hidden_dim: int) -> FeedForward:
    under = weights.under("mlp")
    return _load_ungated(under, shape, hidden_dim, _load_xielu(under.under("act_fn")))


def load_apertus(config: TransformerConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    names = {
        "input_layernorm": "attention_layernorm",
        "post_attention_layernorm": "feedforward_layernorm",
    }
    load = partial(load_transformer, feed_forward=_apertus_mlp)
    return load(config, manifest, weights.called(names))
