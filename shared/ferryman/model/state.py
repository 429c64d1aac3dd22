"""A model's cached state as the layers see it: strided views of the slabs, one per layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ferryman.cache.manifest import Kind, KindLayout, Section, StateManifest


@dataclass(frozen=True, slots=True)
class AttentionState:
    """Pages of one attention layer; both tensors [slots, kv_heads, page_size, head_dim]."""

    key_pages: Tensor
    value_pages: Tensor


@dataclass(frozen=True, slots=True)
class MambaState:
    """Recurrent slots of one Mamba layer.

    `conv_states` [slots, conv_dim, conv_width - 1], `ssm_states` [slots, ssm_heads, ssm_head_dim,
    ssm_state].
    """

    conv_states: Tensor
    ssm_states: Tensor


@dataclass(frozen=True, slots=True)
class ModelState:
    """The state of all layers, by layer index. Views: writing here writes the slabs."""

    attention: Mapping[int, AttentionState]
    mamba: Mapping[int, MambaState]


def state_views(manifest: StateManifest, slabs: Mapping[Kind, Tensor]) -> ModelState:
    """Views of `slabs` (each [slots, slot_bytes], uint8) by the manifest's sections."""
    attention, mamba = {}, {}
    if Kind.FULL in manifest.kinds:
        layout, slab = manifest.layout(Kind.FULL), slabs[Kind.FULL]
        for layer in layout.layers:
            key, value = (section_view(slab, layout.section(n, layer)) for n in ("key", "value"))
            attention[layer] = AttentionState(key, value)
    if Kind.RECURRENT in manifest.kinds:
        layout, slab = manifest.layout(Kind.RECURRENT), slabs[Kind.RECURRENT]
        for layer in layout.layers:
            conv = section_view(slab, _whole_conv(layout, layer))
            mamba[layer] = MambaState(conv, section_view(slab, layout.section("ssm", layer)))
    return ModelState(attention, mamba)


def section_view(slab: Tensor, section: Section) -> Tensor:
    """The section in every slot of `slab`: [slots, *section.shape], in the section's dtype."""
    dtype: torch.dtype = getattr(torch, section.dtype)
    elements = slab.view(dtype)
    begin = section.offset // dtype.itemsize
    end = begin + section.num_bytes // dtype.itemsize
    return elements[:, begin:end].view(len(slab), *section.shape)


def _whole_conv(layout: KindLayout, layer: int) -> Section:
    """x, B and C of a convolution as the one section they are in memory."""
    x, b, c = (layout.section(f"conv.{part}", layer) for part in "xBC")
    channels = x.shape[0] + b.shape[0] + c.shape[0]
    whole = replace(x, name="conv", shape=(channels, *x.shape[1:]))
    if c.offset + c.num_bytes != x.offset + whole.num_bytes:
        raise ValueError(f"x, B and C of the convolution in layer {layer} do not lie side by side")
    return whole
