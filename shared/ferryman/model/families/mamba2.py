"""Mamba2: Mamba-2 mixers alone, one a layer; no attention, so a sequence keeps no pages.

hidden += mixer(norm(hidden))                            hidden in the accumulation dtype, if asked
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ferryman.cache.manifest import StateManifest
from ferryman.model.family import Family
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
from ferryman.model.readers.config_readers import (
    POSITIONS_OF_A_RECURRENCE,
    check_activation,
    read_dt_limit,
    read_trunk,
)
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.model_shapes import ModelConfig, TrunkShape
from ferryman.model.shapes.recurrent_shapes import MambaShape
from ferryman.model.weights.named_weights import Weights


@dataclass(frozen=True, slots=True)
class Mamba2Config:
    """All layers are alike."""

    trunk: TrunkShape
    mamba: MambaShape
    has_wide_residual: bool

    @property
    def states(self) -> tuple[tuple[MambaShape], ...]:
        return ((self.mamba,),) * self.trunk.num_layers


def _read(fields: ConfigFields) -> Mamba2Config:
    check_activation(fields)
    return Mamba2Config(
        trunk=read_recurrent_trunk(fields),
        mamba=_mamba(fields),
        has_wide_residual=fields.flag("residual_in_fp32", True),
    )


def read_recurrent_trunk(fields: ConfigFields) -> TrunkShape:
    """The trunk of a model without attention, which need not name a last position."""
    fields = fields.with_defaults(max_position_embeddings=POSITIONS_OF_A_RECURRENCE)
    return read_trunk(fields, norm_eps="layer_norm_epsilon")


def _mamba(fields: ConfigFields) -> MambaShape:
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


def load_backbone(
    config: ModelConfig,
    manifest: StateManifest,
    weights: Weights,
    load_layer: Callable[[Weights, LayerPlace], Layer],
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
    return load_decoder(config, manifest, ends, weights.under("backbone.layers"), load_layer)


def load_mixer_layer(
    weights: Weights, place: LayerPlace, mixer: Mixer, *, has_wide_residual: bool
) -> Layer:
    norm = load_norm(weights, "norm", place.hidden_dim, place.norm_eps)
    if has_wide_residual:
        return WideMixerLayer(norm, mixer, weights.dtype)
    return MixerLayer(norm, mixer)


def _load(config: Mamba2Config, manifest: StateManifest, weights: Weights) -> Decoder:
    return load_backbone(config, manifest, weights, partial(_layer, config))


def _layer(config: Mamba2Config, weights: Weights, place: LayerPlace) -> Layer:
    mixer = load_mamba(weights.under("mixer"), config.mamba, place)
    return load_mixer_layer(weights, place, mixer, has_wide_residual=config.has_wide_residual)


FAMILY = Family(("Mamba2ForCausalLM",), _read, _load)
