"""RWKV-4: a weighted mean over earlier tokens and an MLP in every layer, both with a token shift.

hidden += time(norm(hidden))
hidden += channels(norm(hidden))

Without attention a sequence keeps no pages. transformers halves the hidden state behind each Nth
layer ("rescale_every"), and divides by as much what later layers add. A norm undoes that, but for
its eps: so here the hidden state is as it was, and eps grows fourfold with each halving. Powers of
two lose no digit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from ferryman.cache.manifest import StateManifest
from ferryman.model.layers.centred_norm import LayerNorm, load_layer_norm
from ferryman.model.layers.decoder import Decoder, EndScales, load_decoder, load_embedding_and_head
from ferryman.model.layers.decoder_layers import LayerPlace
from ferryman.model.layers.rwkv import (
    NormedFirstLayer,
    TwoMixersLayer,
    load_channel_mixer,
    load_time_mixer,
)
from ferryman.model.readers.config_readers import POSITIONS_OF_A_RECURRENCE, read_trunk
from ferryman.model.shapes.cell_shapes import RwkvShape
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.model_shapes import TrunkShape
from ferryman.model.weights.named_weights import Weights

FINAL_EPS = 1e-5
"""The eps of the last norm, independent of the others'."""


@dataclass(frozen=True, slots=True)
class RwkvConfig:
    """Layers of one shape. The hidden state is halved behind every `halving_period`th (0: never).

    `inner_dim` is that of the MLPs.
    """

    trunk: TrunkShape
    mean: RwkvShape
    inner_dim: int
    halving_period: int

    @property
    def states(self) -> tuple[tuple[RwkvShape], ...]:
        return ((self.mean,),) * self.trunk.num_layers

    def eps_after(self, num_layers: int, eps: float) -> float:
        """The eps of a norm behind so many layers, for a hidden state that is never halved."""
        halvings = num_layers // self.halving_period if self.halving_period else 0
        return float(eps * 4**halvings)


def read_rwkv(config: ConfigFields) -> RwkvConfig:
    """RWKV-4: weighted means over earlier tokens; no attention, so a sequence keeps no pages."""
    defaults = {
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": POSITIONS_OF_A_RECURRENCE,
        "rescale_every": 6,
    }
    fields = config.with_defaults(**defaults)
    trunk = read_trunk(fields, norm_eps="layer_norm_epsilon")
    dim = fields.whole("attention_hidden_size", trunk.hidden_dim)
    return RwkvConfig(
        trunk=trunk,
        mean=RwkvShape(dim, trunk.hidden_dim),
        inner_dim=fields.whole("intermediate_size", 4 * trunk.hidden_dim),
        halving_period=_halving_period(fields),
    )


def _halving_period(fields: ConfigFields) -> int:
    """0 and any number below it mean the same."""
    period = fields.raw["rescale_every"]
    if isinstance(period, bool) or not isinstance(period, int):
        raise fields.refusal("rescale_every", "a whole number")
    return max(0, period)


def load_rwkv(config: RwkvConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    def load_last_norm(weights: Weights, name: str, dim: int, eps: float) -> LayerNorm:
        # transformers gives it an eps of its own.
        eps = config.eps_after(config.trunk.num_layers, FINAL_EPS)
        return load_layer_norm(weights, name, dim, eps)

    ends = load_embedding_and_head(
        weights.called({"lm_head": "head"}),
        config.trunk,
        "rwkv.ln_out.weight",
        EndScales(),
        embedded="rwkv.embeddings.weight",
        load_norm=load_last_norm,
    )
    layers = weights.under("rwkv.blocks")
    decoder = load_decoder(config, manifest, ends, layers, partial(_layer, config))
    trunk, (first, *others) = config.trunk, decoder.layers
    norm = load_layer_norm(layers.under("0"), "pre_ln", trunk.hidden_dim, trunk.norm_eps)
    return replace(decoder, layers=(NormedFirstLayer(norm, first), *others))


def _layer(config: RwkvConfig, weights: Weights, place: LayerPlace) -> TwoMixersLayer:
    eps = config.eps_after(place.layer, place.norm_eps)
    first, second = (
        load_layer_norm(weights, name, place.hidden_dim, eps) for name in ("ln1", "ln2")
    )
    time = load_time_mixer(weights.under("attention"), config.mean, place)
    channels = load_channel_mixer(weights.under("feed_forward"), config.inner_dim, place)
    return TwoMixersLayer(first, time, second, channels)
