"""LFM3: short convolutions, attention in windows and full, a gate of one number a head.

hidden += norm(mixer(operator_norm(hidden)))
hidden += norm(w2(silu(w1(x)) · w3(x))),  x = ffn_norm(hidden)

The norms behind mixer and MLP are left out if the config says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from ferryman.cache.manifest import StateManifest
from ferryman.model.families.lfm import Operator, load_operator, read_short_conv
from ferryman.model.layers.decoder import Decoder, EndScales, load_model_decoder
from ferryman.model.layers.decoder_layers import (
    DecoderLayer,
    LayerPlace,
    SandwichLayer,
    load_norm,
)
from ferryman.model.layers.mlp import load_gated_mlp
from ferryman.model.readers.config_readers import (
    head_dim_of,
    read_layers,
    read_rotary,
    read_trunk,
    read_used,
)
from ferryman.model.readers.transformer_readers import (
    FULL,
    WINDOW,
    read_plain_mlp,
    read_rotary_attention,
    with_rope_of,
)
from ferryman.model.shapes.attention_shapes import (
    AttentionShape,
    GateActivation,
    GateShape,
    HeadNorm,
    RotaryPositions,
)
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import MlpShape
from ferryman.model.shapes.model_shapes import TrunkShape
from ferryman.model.shapes.rotary import ProportionalScaling, read_theta
from ferryman.model.weights.named_weights import Weights

CONV = "conv"
DEFAULTS: Mapping[str, object] = {
    "head_dim": 128,
    "conv_L_cache": 7,
    "sliding_window": 256,
    "tie_word_embeddings": True,
    "rope_parameters": {
        WINDOW: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {
            "rope_type": "proportional",
            "rope_theta": 1_000_000.0,
            "partial_rotary_factor": 0.5,
        },
    },
}
"""The meaning of fields that a config leaves out."""

_WORDS = (WINDOW, CONV, FULL, CONV)  # of four layers; the first of a model is a convolution

# This family's words for parts of a tensor's name.
_NAMES: Mapping[str, str] = {
    "g_proj": "gate_proj",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
}


@dataclass(frozen=True, slots=True)
class Lfm3Config:
    """One operator a layer, and one MLP shape for all. `has_norms_behind`: of both, in each."""

    trunk: TrunkShape
    operators: tuple[Operator, ...]
    mlp: MlpShape
    has_norms_behind: bool

    @property
    def states(self) -> tuple[tuple[Operator], ...]:
        return tuple((operator,) for operator in self.operators)


def read_lfm3(fields: ConfigFields) -> Lfm3Config:
    """LFM3: short convolutions, attention in windows and full, gated by head; norms around both."""
    fields = fields.with_former(norm_eps="rms_norm_eps").with_defaults(**DEFAULTS)
    readers: dict[str, Callable[[], Operator]] = {
        CONV: partial(read_short_conv, fields),
        WINDOW: partial(_attention, fields, WINDOW),
        FULL: partial(_attention, fields, FULL),
    }
    types = [_WORDS[i % len(_WORDS)] if i else CONV for i in range(_num_layers(fields))]
    named = fields.with_defaults(layer_types=types)
    return Lfm3Config(
        trunk=read_trunk(fields, norm_eps="norm_eps"),
        operators=read_used(read_layers(named, "layer_types", readers)),
        mlp=read_plain_mlp(fields),
        has_norms_behind=fields.flag("use_sandwich_norm", True),
    )


def _num_layers(fields: ConfigFields) -> int:
    return fields.whole("num_hidden_layers")


def _attention(fields: ConfigFields, word: str) -> AttentionShape:
    turning = with_rope_of(fields, word)
    plain = ConfigFields(fields.source, {**fields.raw, "rope_parameters": None})
    gate = GateShape("g_proj", GateActivation.SIGMOID, is_by_head=True)
    return replace(
        read_rotary_attention(plain),
        positions=_positions(turning),
        head_norm=HeadNorm.EACH_HEAD,
        gate=gate if fields.flag("use_attention_gate", True) else None,
        window_len=fields.whole("sliding_window") if word == WINDOW else 0,
    )


def _positions(fields: ConfigFields) -> RotaryPositions:
    rope = fields.inner("rope_parameters")
    if rope.raw.get("rope_type") != "proportional":
        return read_rotary(fields, default_factor=1.0)
    head_dim, share = head_dim_of(fields), rope.positive("partial_rotary_factor", 1.0)
    if share > 1.0:
        raise rope.refusal("partial_rotary_factor", "at most 1")
    turning = ProportionalScaling(int(share * head_dim // 2), rope.positive("factor", 1.0))
    return RotaryPositions(read_theta(rope, 1_000_000.0), head_dim, turning)


def load_lfm3(config: Lfm3Config, manifest: StateManifest, weights: Weights) -> Decoder:
    return load_model_decoder(
        config,
        manifest,
        weights.called(_NAMES),
        partial(_layer, config),
        EndScales(),
        final_norm="embedding_norm",
    )


def _layer(config: Lfm3Config, weights: Weights, place: LayerPlace) -> DecoderLayer | SandwichLayer:
    dim = place.hidden_dim
    norm = partial(load_norm, weights, dim=dim, eps=place.norm_eps)
    mixer = load_operator(weights, config.operators[place.layer], place)
    mlp = load_gated_mlp(weights.under("feed_forward"), config.mlp, dim)
    before = norm("operator_norm"), norm("ffn_norm")
    if not config.has_norms_behind:
        return DecoderLayer(before[0], mixer, before[1], mlp)
    return SandwichLayer(
        before[0], mixer, norm("post_operator_norm"), before[1], mlp, norm("post_ffn_norm")
    )
