"""Qwen 3, dense, and the text of its image models: Llama with a norm on each head of q and k."""

from __future__ import annotations

from dataclasses import replace

from ferryman.cache.manifest import StateManifest
from ferryman.model.families.qwen2 import read_qwen_windows
from ferryman.model.family import Family
from ferryman.model.layers.decoder import Decoder
from ferryman.model.layers.transformer import TransformerConfig, load_transformer
from ferryman.model.readers.config_readers import check_activation, read_trunk
from ferryman.model.readers.text_model import text_fields, text_weights
from ferryman.model.readers.transformer_readers import read_plain_mlp, read_rotary_attention
from ferryman.model.shapes.attention_shapes import HeadNorm
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.weights.named_weights import Weights


def _read(whole: ConfigFields) -> TransformerConfig:
    fields = text_fields(whole)
    check_activation(fields)
    trunk = read_trunk(fields)
    full = replace(read_rotary_attention(fields), head_norm=HeadNorm.EACH_HEAD)
    return TransformerConfig(
        trunk,
        attention=read_qwen_windows(fields, full),
        feed_forwards=(read_plain_mlp(fields),) * trunk.num_layers,
    )


def _load(config: TransformerConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    return load_transformer(config, manifest, text_weights(weights))


FAMILY = Family(("Qwen3ForCausalLM", "Qwen3VLForConditionalGeneration"), _read, _load)
