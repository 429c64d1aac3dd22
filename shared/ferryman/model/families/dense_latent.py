"""Youtu-LLM and MiniCPM 3: DeepSeek's latent attention, and a gated MLP in every layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from ferryman.cache.manifest import StateManifest
from ferryman.model.families.deepseek import read_turning_latent
from ferryman.model.layers.decoder import Decoder, EndScales, load_model_decoder
from ferryman.model.layers.decoder_layers import DecoderLayer, LayerPlace, load_decoder_layer
from ferryman.model.layers.latent import load_latent_attention
from ferryman.model.layers.mlp import load_gated_mlp
from ferryman.model.readers.config_readers import check_activation, read_mlp, read_trunk
from ferryman.model.readers.transformer_readers import read_plain_mlp
from ferryman.model.shapes.attention_shapes import LatentShape
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import MlpShape
from ferryman.model.shapes.model_shapes import TrunkShape
from ferryman.model.weights.named_weights import Weights

MINICPM3_DEFAULTS = {
    "tie_word_embeddings": True,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 256,
}
"""The meaning of fields that a config of MiniCPM 3 leaves out."""


@dataclass(frozen=True, slots=True)
class DenseLatentConfig:
    """One latent attention and one gated MLP, alike in all layers."""

    trunk: TrunkShape
    attention: LatentShape
    mlp: MlpShape
    scales: EndScales = field(default_factory=EndScales)
    residual_multiplier: float = 1.0

    @property
    def states(self) -> tuple[tuple[LatentShape], ...]:
        return ((self.attention,),) * self.trunk.num_layers


def read_youtu(fields: ConfigFields) -> DenseLatentConfig:
    """Youtu-LLM: the latent attention of DeepSeek-V3, and a gated MLP in every layer."""
    fields = fields.with_defaults(tie_word_embeddings=True)
    check_activation(fields)
    return DenseLatentConfig(
        read_trunk(fields), read_turning_latent(fields), read_plain_mlp(fields)
    )


def read_minicpm3(fields: ConfigFields) -> DenseLatentConfig:
    """MiniCPM 3: latent attention, a gated MLP, and multipliers at ends and residual paths.

    Scaling is that of maximal update parametrisation (Yang et al. 2022).
    """
    trunk = read_trunk(fields.with_defaults(**MINICPM3_DEFAULTS))
    hidden_dim, num_layers = trunk.hidden_dim, trunk.num_layers
    fields = fields.with_defaults(
        **MINICPM3_DEFAULTS,
        v_head_dim=hidden_dim // fields.whole("num_attention_heads"),
        rope_interleave=False,
    )
    check_activation(fields)
    return DenseLatentConfig(
        trunk,
        read_turning_latent(fields),
        read_mlp(fields),
        EndScales(fields.positive("scale_emb"), hidden_dim / fields.positive("dim_model_base")),
        residual_multiplier=fields.positive("scale_depth") / num_layers**0.5,
    )


def load_dense_latent(
    config: DenseLatentConfig, manifest: StateManifest, weights: Weights
) -> Decoder:
    return load_model_decoder(config, manifest, weights, partial(_layer, config), config.scales)


def _layer(config: DenseLatentConfig, weights: Weights, place: LayerPlace) -> DecoderLayer:
    return load_decoder_layer(
        weights,
        place,
        load_latent_attention(weights.under("self_attn"), config.attention, place),
        load_gated_mlp(weights.under("mlp"), config.mlp, place.hidden_dim),
        residual_multiplier=config.residual_multiplier,
    )
