"""Mamba, Mamba2 and FalconMamba: recurrent mixers alone, one a layer.

hidden += mixer(norm(hidden))                            hidden in the accumulation dtype, if asked

Without attention a sequence keeps no pages. All layers are alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from ferryman.cache.manifest import StateManifest
from ferryman.model.layers.decoder import Decoder, EndScales, load_decoder, load_embedding_and_head
from ferryman.model.layers.decoder_layers import (
    Layer,
    LayerPlace,
    Mixer,
    MixerLayer,
    WideMixerLayer,
    load_norm,
)
from ferryman.model.layers.mamba import load_mamba
from ferryman.model.layers.mamba1 import load_mamba1
from ferryman.model.readers.config_readers import (
    POSITIONS_OF_A_RECURRENCE,
    check_activation,
    read_dt_limit,
    read_trunk,
)
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.model_shapes import TrunkShape
from ferryman.model.shapes.recurrent_shapes import InnerNorms, Mamba1Shape, MambaShape
from ferryman.model.weights.named_weights import Weights

_HIDDEN_PER_RANK = 16  # "auto": this many channels of hidden for each rank of dt


@dataclass(frozen=True, slots=True)
class MambaConfig:
    """Mamba-1 mixers."""

    trunk: TrunkShape
    mamba: Mamba1Shape
    has_wide_residual: bool

    @property
    def states(self) -> tuple[tuple[Mamba1Shape], ...]:
        return ((self.mamba,),) * self.trunk.num_layers


@dataclass(frozen=True, slots=True)
class Mamba2Config:
    """Mamba-2 mixers."""

    trunk: TrunkShape
    mamba: MambaShape
    has_wide_residual: bool

    @property
    def states(self) -> tuple[tuple[MambaShape], ...]:
        return ((self.mamba,),) * self.trunk.num_layers


def read_mamba(fields: ConfigFields) -> MambaConfig:
    """Mamba: Mamba-1 mixers alone, one a layer; no attention, so a sequence keeps no pages."""
    check_activation(fields)
    trunk = _trunk(fields.with_defaults(tie_word_embeddings=True))
    return MambaConfig(trunk, _mamba1(fields), fields.flag("residual_in_fp32", True))


def read_falcon_mamba(fields: ConfigFields) -> MambaConfig:
    """FalconMamba: Mamba whose dt, B and C go through norms without weights before the scan."""
    plain, eps = read_mamba(fields), fields.positive("mixer_rms_eps", 1e-6)
    normed = replace(plain.mamba, norms=InnerNorms.WITHOUT_WEIGHTS, norm_eps=eps)
    return replace(plain, mamba=normed)


def read_mamba2(fields: ConfigFields) -> Mamba2Config:
    """Mamba2: Mamba-2 mixers alone, one a layer; no attention, so a sequence keeps no pages."""
    check_activation(fields)
    has_wide_residual = fields.flag("residual_in_fp32", True)
    return Mamba2Config(_trunk(fields), _mamba2(fields), has_wide_residual)


def _trunk(fields: ConfigFields) -> TrunkShape:
    """The trunk of a model without attention, which need not name a last position."""
    fields = fields.with_defaults(max_position_embeddings=POSITIONS_OF_A_RECURRENCE)
    return read_trunk(fields, norm_eps="layer_norm_epsilon")


def _mamba1(fields: ConfigFields) -> Mamba1Shape:
    hidden_dim = fields.whole("hidden_size")
    return Mamba1Shape(
        # FalconMamba publishes an `expand` that its `intermediate_size` contradicts.
        inner_dim=fields.whole("intermediate_size", fields.whole("expand", 2) * hidden_dim),
        ssm_state=fields.whole("state_size"),
        dt_rank=read_dt_rank(fields, "time_step_rank"),
        conv_width=fields.whole("conv_kernel", 4, least=2),
        has_conv_bias=fields.flag("use_conv_bias", True),
        has_bias=fields.flag("use_bias", False),
    )


def read_dt_rank(fields: ConfigFields, name: str) -> int:
    """The rank of dt in Mamba-1: a number, or "auto"."""
    if fields.with_defaults(**{name: "auto"}).raw[name] != "auto":
        return fields.whole(name)
    return -(-fields.whole("hidden_size") // _HIDDEN_PER_RANK)


def _mamba2(fields: ConfigFields) -> MambaShape:
    heads, head_dim = fields.whole("num_heads"), fields.whole("head_dim")
    inner_dim = fields.whole("expand", 2) * fields.whole("hidden_size")
    if heads * head_dim != inner_dim:
        raise fields.refusal("num_heads", f"such that heads × head_dim = {inner_dim}")
    groups = fields.whole("n_groups", 8)
    if heads % groups:
        raise fields.refusal("n_groups", f"a divisor of num_heads {heads}")
    has_bias = fields.flag("use_bias", False)
    return MambaShape(
        ssm_heads=heads,
        ssm_head_dim=head_dim,
        ssm_groups=groups,
        ssm_state=fields.whole("state_size"),
        conv_width=fields.whole("conv_kernel", 4, least=2),
        has_conv_bias=fields.flag("use_conv_bias", True),
        has_in_bias=has_bias,
        has_out_bias=has_bias,
        dt_limit=read_dt_limit(fields),
    )


def load_mamba1_model(config: MambaConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    def load_mixer(inside: Weights, place: LayerPlace) -> Mixer:
        return load_mamba1(inside, config.mamba, place)

    return _load(config, manifest, weights, load_mixer)


def load_mamba2_model(config: Mamba2Config, manifest: StateManifest, weights: Weights) -> Decoder:
    def load_mixer(inside: Weights, place: LayerPlace) -> Mixer:
        return load_mamba(inside, config.mamba, place)

    return _load(config, manifest, weights, load_mixer)


def _load(
    config: MambaConfig | Mamba2Config,
    manifest: StateManifest,
    weights: Weights,
    load_mixer: Callable[[Weights, LayerPlace], Mixer],
) -> Decoder:
    """The decoder of a Mamba checkpoint, with layers under "backbone"."""
    embedded = "embeddings.weight", "embedding.weight"
    ends = load_embedding_and_head(
        weights,
        config.trunk,
        "backbone.norm_f.weight",
        EndScales(),
        embedded=weights.first_of(*(f"backbone.{name}" for name in embedded)),
    )
    layer = partial(_layer, config, load_mixer)
    return load_decoder(config, manifest, ends, weights.under("backbone.layers"), layer)


def _layer(
    config: MambaConfig | Mamba2Config,
    load_mixer: Callable[[Weights, LayerPlace], Mixer],
    weights: Weights,
    place: LayerPlace,
) -> Layer:
    norm = load_norm(weights, "norm", place.hidden_dim, place.norm_eps)
    mixer = load_mixer(weights.under("mixer"), place)
    if config.has_wide_residual:
        return WideMixerLayer(norm, mixer, weights.dtype)
    return MixerLayer(norm, mixer)
