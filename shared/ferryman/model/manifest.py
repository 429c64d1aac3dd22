"""The state manifest of a model: which sections its layers keep in a slot, and where.

A page's slot holds "key" and "value" of every attention layer; a recurrent slot holds "conv.x",
"conv.B", "conv.C" and "ssm" of every Mamba layer.
"""

from __future__ import annotations

from dataclasses import replace

from ferryman.cache.manifest import (
    Kind,
    KindLayout,
    Section,
    SectionSpec,
    StateManifest,
    lay_out,
)
from ferryman.model.config import ModelConfig
from ferryman.model.shapes import AttentionShape, MambaShape, Mixer

MAX_SCAN_CHUNK = 64


def state_manifest(
    config: ModelConfig, dtype: str, page_size: int, fingerprint: str
) -> StateManifest:
    """What `config` keeps per page and per recurrent slot, in `dtype`."""
    attention = _layers(config, Mixer.ATTENTION)
    mamba = _layers(config, Mixer.MAMBA)
    layouts = []
    if attention:
        layouts.append(_page_layout(attention, config.attention, dtype, page_size))
    if mamba:
        layouts.append(_recurrent_layout(mamba, config.mamba, dtype))
    return StateManifest(
        fingerprint=fingerprint,
        page_size=page_size,
        scan_chunk=min(page_size, MAX_SCAN_CHUNK),
        window_len=0,
        layouts=tuple(layouts),
    )


def _layers(config: ModelConfig, mixer: Mixer) -> tuple[int, ...]:
    return tuple(i for i, found in enumerate(config.trunk.mixers) if found is mixer)


def _page_layout(
    layers: tuple[int, ...], attention: AttentionShape, dtype: str, page_size: int
) -> KindLayout:
    shape = (attention.kv_heads, page_size, attention.head_dim)
    return lay_out(
        Kind.FULL,
        [
            SectionSpec(name, layer, shape, dtype, shard_axis=0)
            for layer in layers
            for name in ("key", "value")
        ],
    )


def _recurrent_layout(layers: tuple[int, ...], mamba: MambaShape, dtype: str) -> KindLayout:
    conv_shape = (mamba.conv_dim, mamba.conv_width - 1)
    ssm_shape = (mamba.ssm_heads, mamba.ssm_head_dim, mamba.ssm_state)
    accumulation = "float64" if dtype == "float64" else "float32"
    specs = [
        spec
        for layer in layers
        for spec in (
            SectionSpec("conv", layer, conv_shape, dtype, shard_axis=0),
            SectionSpec("ssm", layer, ssm_shape, accumulation, shard_axis=0),
        )
    ]
    layout = lay_out(Kind.RECURRENT, specs)
    sections = [part for section in layout.sections for part in _conv_parts(section, mamba)]
    return replace(layout, sections=tuple(sections))


def _conv_parts(section: Section, mamba: MambaShape) -> list[Section]:
    """x, B and C of a convolution as sections of their own, because they are sharded apart.

    They lie one behind the other without padding, so that one strided view covers all three.
    """
    if section.name != "conv":
        return [section]
    parts, offset = [], section.offset
    widths = (("x", mamba.inner_dim), ("B", mamba.group_dim), ("C", mamba.group_dim))
    for name, channels in widths:
        shape = (channels, *section.shape[1:])
        part = replace(section, name=f"conv.{name}", shape=shape, offset=offset)
        parts.append(part)
        offset += part.num_bytes
    return parts
