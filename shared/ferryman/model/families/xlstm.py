"""xLSTM: a matrix LSTM and a gated MLP in every layer.

hidden += mixer(norm(hidden))
hidden += down(silu(gate) · up),  gate and up of norm(hidden)

Without attention a sequence keeps no pages. All layers are alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ferryman.cache.manifest import StateManifest
from ferryman.model.layers.decoder import Decoder, EndScales, load_decoder, load_embedding_and_head
from ferryman.model.layers.decoder_layers import DecoderLayer, LayerPlace, load_decoder_layer
from ferryman.model.layers.mlp import load_gated_mlp
from ferryman.model.layers.mlstm import load_mlstm
from ferryman.model.readers.config_readers import (
    POSITIONS_OF_A_RECURRENCE,
    check_flags,
    check_values,
    read_trunk,
)
from ferryman.model.shapes.cell_shapes import MlstmShape
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import MlpShape
from ferryman.model.shapes.model_shapes import TrunkShape
from ferryman.model.weights.named_weights import Weights

# The meanings of fields that published configs leave out.
DEFAULTS: Mapping[str, Any] = {
    "eps": 1e-6,
    "ffn_proj_factor": 2.667,
    "ffn_round_up_to_multiple_of": 64,
    "gate_soft_cap": 15.0,
    "max_position_embeddings": POSITIONS_OF_A_RECURRENCE,
    "norm_eps": 1e-6,
    "output_logit_soft_cap": 30.0,
    "qk_dim_factor": 0.5,
    "v_dim_factor": 1.0,
}

SINGLE, WIDE = "single", "float32"


@dataclass(frozen=True, slots=True)
class XlstmConfig:
    """Matrix LSTMs and MLPs of one shape."""

    trunk: TrunkShape
    cell: MlstmShape
    mlp: MlpShape
    logits_cap: float

    @property
    def states(self) -> tuple[tuple[MlstmShape], ...]:
        return ((self.cell,),) * self.trunk.num_layers


def read_xlstm(config: ConfigFields) -> XlstmConfig:
    """xLSTM: matrix LSTMs and gated MLPs; no attention, so a sequence keeps no pages."""
    fields = _of_one_name(config).with_defaults(**DEFAULTS)
    check_flags(fields, use_bias=False, add_out_norm=True, tie_word_embeddings=False)
    check_values(fields, {"weight_mode": SINGLE, "inference_state_dtype": WIDE})
    return XlstmConfig(
        trunk=read_trunk(fields, norm_eps="norm_eps"),
        cell=_cell(fields),
        mlp=MlpShape(_inner_dim(fields), has_bias=False),
        logits_cap=fields.positive("output_logit_soft_cap"),
    )


def _of_one_name(config: ConfigFields) -> ConfigFields:
    """The fields with one name for the width and one for the number of layers. Configs have either
    of two, and transformers makes some parts by one of them and some by the other."""
    fields = config.with_former(hidden_size="embedding_dim", num_hidden_layers="num_blocks")
    for name, other in {"hidden_size": "embedding_dim", "num_hidden_layers": "num_blocks"}.items():
        if fields.raw.get(other) is not None and fields.whole(other) != fields.whole(name):
            raise fields.refusal(other, f"{name} {fields.whole(name)}, if both are there")
    return fields


def _cell(fields: ConfigFields) -> MlstmShape:
    return MlstmShape(
        heads=fields.whole("num_heads"),
        k_dim=_head_dim(fields, "qk_dim_factor"),
        v_dim=_head_dim(fields, "v_dim_factor"),
        gate_cap=fields.positive("gate_soft_cap"),
        eps=fields.positive("eps"),
    )


def _head_dim(fields: ConfigFields, name: str) -> int:
    """A head's part of the channels that a factor of the width makes."""
    heads = fields.whole("num_heads")
    dim = int(fields.whole("hidden_size") * fields.positive(name))
    if not dim or dim % heads:
        raise fields.refusal(name, f"such that {heads} heads divide its part of hidden_size")
    return dim // heads


def _inner_dim(fields: ConfigFields) -> int:
    """The next multiple of a number of channels."""
    unit = fields.whole("ffn_round_up_to_multiple_of")
    wanted = fields.whole("hidden_size") * fields.positive("ffn_proj_factor")
    return int((wanted + unit - 1) // unit * unit)


def load_xlstm(config: XlstmConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    inside = weights.under("backbone")
    ends = load_embedding_and_head(
        weights,
        config.trunk,
        "backbone.out_norm.weight",
        EndScales(logits_cap=config.logits_cap),
        embedded="backbone.embeddings.weight",
    )
    return load_decoder(config, manifest, ends, inside.under("blocks"), partial(_layer, config))


def _layer(config: XlstmConfig, weights: Weights, place: LayerPlace) -> DecoderLayer:
    names = {"gate_proj": "proj_up_gate", "up_proj": "proj_up", "down_proj": "proj_down"}
    mlp = load_gated_mlp(weights.under("ffn").called(names), config.mlp, place.hidden_dim)
    mixer = load_mlstm(weights.under("mlstm_layer"), config.cell, place)
    return load_decoder_layer(weights, place, mixer, mlp, norms=("norm_mlstm", "norm_ffn"))
