"""Qwen 3, dense: Llama with a norm on each head of q and k, and windows in some layers if asked."""

from __future__ import annotations

from dataclasses import replace

from ferryman.model.families.llama import DenseConfig, load_dense
from ferryman.model.family import Family
from ferryman.model.fields import Fields
from ferryman.model.reading import (
    check_activation,
    head_dim_of,
    read_attention,
    read_layers,
    read_mlp,
    read_rotary,
    read_trunk,
)
from ferryman.model.shapes import AttentionShape


def _read(fields: Fields) -> DenseConfig:
    check_activation(fields)
    trunk = read_trunk(fields)
    return DenseConfig(trunk, _attention(fields, trunk.num_layers), read_mlp(fields))


def _attention(fields: Fields, num_layers: int) -> tuple[AttentionShape, ...]:
    shape = read_attention(
        fields, head_dim_of(fields) ** -0.5, read_rotary(fields, default_factor=1.0)
    )
    full = replace(shape, norms_heads=True)
    if not fields.flag("use_sliding_window", False):
        return (full,) * num_layers
    window = replace(full, window_len=fields.whole("sliding_window"))
    meanings = {"full_attention": full, "sliding_attention": window}
    return read_layers(fields, "layer_types", meanings)


FAMILY = Family(("Qwen3ForCausalLM",), _read, load_dense)
