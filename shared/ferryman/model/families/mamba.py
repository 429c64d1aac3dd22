"""Mamba: Mamba-1 mixers alone, one a layer; no attention, so a sequence keeps no pages.

hidden += mixer(norm(hidden))                            hidden in the accumulation dtype, if asked
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ferryman.cache.manifest import StateManifest
from ferryman.model.families.mamba2 import load_backbone, load_mixer_layer, read_recurrent_trunk
from ferryman.model.family import Family
from ferryman.model.layers.decoder import Decoder
from ferryman.model.layers.decoder_layers import Layer, LayerPlace
from ferryman.model.layers.mamba1 import load_mamba1
from ferryman.model.readers.config_readers import check_activation
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.model_shapes import TrunkShape
from ferryman.model.shapes.recurrent_shapes import Mamba1Shape
from ferryman.model.weights.named_weights import Weights

_HIDDEN_PER_RANK = 16  # "auto": this many channels of hidden for each rank of dt


@dataclass(frozen=True, slots=True)
class MambaConfig:
    """All layers are alike."""

    trunk: TrunkShape
    mamba: Mamba1Shape
    has_wide_residual: bool

    @property
    def states(self) -> tuple[tuple[Mamba1Shape], ...]:
        return ((self.mamba,),) * self.trunk.num_layers


def _read(fields: ConfigFields) -> MambaConfig:
    return read_mamba_config(fields, read_mamba1(fields.with_defaults(time_step_rank="auto")))


def read_mamba_config(fields: ConfigFields, mamba: Mamba1Shape) -> MambaConfig:
    check_activation(fields)
    fields = fields.with_defaults(tie_word_embeddings=True)
    trunk = read_recurrent_trunk(fields)
    return MambaConfig(trunk, mamba, fields.flag("residual_in_fp32", True))


def read_mamba1(fields: ConfigFields, rank: str = "time_step_rank") -> Mamba1Shape:
    """A Mamba-1 mixer without inner norms; `rank` is the field's name in this config."""
    hidden_dim = fields.whole("hidden_size")
    is_auto = fields.raw.get(rank) == "auto"
    dt_rank = -(-hidden_dim // _HIDDEN_PER_RANK) if is_auto else fields.whole(rank)
    return Mamba1Shape(
        # FalconMamba publishes an `expand` that its `intermediate_size` contradicts.
        inner_dim=fields.whole("intermediate_size", fields.whole("expand", 2) * hidden_dim),
        ssm_state=fields.whole("state_size"),
        dt_rank=dt_rank,
        conv_width=fields.whole("conv_kernel", 4, least=2),
        has_conv_bias=fields.flag("use_conv_bias", True),
        has_bias=fields.flag("use_bias", False),
    )


def load_mamba_decoder(config: MambaConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    return load_backbone(config, manifest, weights, partial(_layer, config))


def _layer(config: MambaConfig, weights: Weights, place: LayerPlace) -> Layer:
    mixer = load_mamba1(weights.under("mixer"), config.mamba, place)
    return load_mixer_layer(weights, place, mixer, has_wide_residual=config.has_wide_residual)


FAMILY = Family(("MambaForCausalLM",), _read, load_mamba_decoder)
