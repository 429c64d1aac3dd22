"""A model's cached state as the layers see it: strided views of the slabs, one per layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from ferryman.cache.manifest import Kind, KindLayout, Section, StateManifest
from ferryman.model.shapes.state_kernels import (
    StateKernels,
    fastest,
    in_one_order,
    scanned_by_token,
)
from ferryman_kernels.attention.page_layout import PageScales
from ferryman_kernels.attention.paged_attention import reads_codes
from ferryman_kernels.attention.pages import write_kv
from ferryman_kernels.attention.quantised_pages import named_pages, opened_pages, write_coded_kv
from ferryman_kernels.elementwise.heads_into_pages import (
    HeadTurn,
    ProjectedHeads,
    TokenPlaces,
    heads_into_pages,
    turned_heads,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AttentionState:
    """Pages of one attention layer; both tensors [slots, kv_heads, page_size, head_dim].

    With `scales` they are pages of codes, for kernels that open them as they read.
    """

    key_pages: Tensor
    value_pages: Tensor
    scales: PageScales | None = None

    def write(
        self, keys: Tensor, values: Tensor, table: Tensor, rows: Tensor, positions: Tensor
    ) -> None:
        """Writes keys and values [tokens, kv_heads, head_dim] as `write_kv` does."""
        write_kv(self.key_pages, self.value_pages, keys, values, table, rows, positions)

    def write_turned(self, heads: ProjectedHeads, turn: HeadTurn, places: TokenPlaces) -> Tensor:
        """Writes keys and values after their norms and their rotation; returns q after its own."""
        if heads.q.is_cuda:
            return heads_into_pages(heads, turn, self.key_pages, self.value_pages, places)
        return written_by_parts(self, heads, turn, places)

    def opened(self, table: Tensor, dtype: torch.dtype) -> tuple[AttentionState, Tensor]:
        """Pages in `dtype`, and a table of them that names what `table` [rows, pages] does."""
        return self, table


@dataclass(frozen=True, slots=True)
class CodedAttentionState:
    """Pages of one attention layer as e4m3 codes, [slots, kv_heads, page_size, head_dim], with a
    scale for each token and head, [slots, kv_heads, page_size]."""

    key_pages: Tensor
    value_pages: Tensor
    key_scales: Tensor
    value_scales: Tensor

    def write(
        self, keys: Tensor, values: Tensor, table: Tensor, rows: Tensor, positions: Tensor
    ) -> None:
        """Writes like `AttentionState.write`. Reading gives what was stored."""
        pages = (self.key_pages, self.value_pages, self.key_scales, self.value_scales)
        write_coded_kv(*pages, keys, values, table, rows, positions)

    def write_turned(self, heads: ProjectedHeads, turn: HeadTurn, places: TokenPlaces) -> Tensor:
        """Writes like `AttentionState.write_turned`, op by op: a code follows from a whole head."""
        return written_by_parts(self, heads, turn, places)

    def opened(self, table: Tensor, dtype: torch.dtype) -> tuple[AttentionState, Tensor]:
        """A copy of the pages that the table names, unless attention reads codes: as
        `AttentionState.opened`."""
        if reads_codes(table, dtype):
            scales = self.key_scales, self.value_scales
            return AttentionState(self.key_pages, self.value_pages, scales), table
        slots, places = named_pages(table)
        keys = opened_pages(self.key_pages, self.key_scales, slots, dtype)
        values = opened_pages(self.value_pages, self.value_scales, slots, dtype)
        return AttentionState(keys, values), places


PagedState = AttentionState | CodedAttentionState


def written_by_parts(
    pages: PagedState, heads: ProjectedHeads, turn: HeadTurn, places: TokenPlaces
) -> Tensor:
    """`write_turned`, by an op for each part."""
    turned = turned_heads(heads, turn, places.positions)
    pages.write(turned.k, turned.v, *places)
    return turned.q


@dataclass(slots=True)
class LayerCount:
    """The layers that have run since the start, for a watcher on another thread.

    A step on a slow processor takes minutes; this distinguishes it from a step that hangs.
    """

    num_done: int = 0


@dataclass(frozen=True, slots=True)
class ModelState:
    """The state of all layers, by layer index. Views: writing here writes the slabs.

    `conv` [slots, conv_dim, conv_width - 1] and `ssm` are in recurrent slots, and a layer may have
    one without the other. `ssm` is [slots, ssm_heads, ssm_head_dim, ssm_state] for Mamba-2, [slots,
    v_heads, k_dim, v_dim] for a gated delta net, [slots, heads, v_dim, k_dim] for an mLSTM, [slots,
    3, dim] for RWKV-4, and [slots, 3 · series, channels] for the means of blocks. `norm` [slots,
    heads, k_dim + 1] is an mLSTM's, with the running maximum behind a head's norm. `hidden` [slots,
    hidden_dim] is there too: the last token's hidden state, for a model that drafts for itself. So
    is `ngram` [slots, channels, depth]: the last inputs of the convolution of a layer's n-grams,
    and the bytes of the last ids. `latent` and `index` are pages of one row a token: [slots,
    page_size, channels]; `blocks` are pages of one row a block of tokens, as is the `index` of such
    a layer. `kernels` are those of the state's arithmetic.
    """

    attention: Mapping[int, PagedState]
    conv: Mapping[int, Tensor]
    ssm: Mapping[int, Tensor]
    norm: Mapping[int, Tensor]
    latent: Mapping[int, Tensor]
    index: Mapping[int, Tensor]
    blocks: Mapping[int, Tensor]
    hidden: Mapping[int, Tensor]
    ngram: Mapping[int, Tensor]
    kernels: StateKernels
    layers_run: LayerCount = field(default_factory=LayerCount)

    @property
    def by_token(self) -> ModelState:
        """The same state, whose recurrences are scanned token by token."""
        return replace(self, kernels=scanned_by_token(self.kernels))

    def from_layer(self, num_layers: int) -> ModelState:
        """The layers from `num_layers` on, counted from there: those of a draft model."""
        return ModelState(
            _counted_from(num_layers, self.attention),
            _counted_from(num_layers, self.conv),
            _counted_from(num_layers, self.ssm),
            _counted_from(num_layers, self.norm),
            _counted_from(num_layers, self.latent),
            _counted_from(num_layers, self.index),
            _counted_from(num_layers, self.blocks),
            _counted_from(num_layers, self.hidden),
            _counted_from(num_layers, self.ngram),
            self.kernels,
            self.layers_run,
        )


def _counted_from(first: int, layers: Mapping[int, T]) -> dict[int, T]:
    return {layer - first: state for layer, state in layers.items() if layer >= first}


def state_views(manifest: StateManifest, slabs: Mapping[Kind, Tensor]) -> ModelState:
    """Views of `slabs` (each [slots, slot_bytes], uint8) by the manifest's sections."""
    attention: dict[int, PagedState] = {}
    conv: dict[int, Tensor] = {}
    ssm: dict[int, Tensor] = {}
    norm: dict[int, Tensor] = {}
    latent: dict[int, Tensor] = {}
    index: dict[int, Tensor] = {}
    blocks: dict[int, Tensor] = {}
    hidden: dict[int, Tensor] = {}
    ngram: dict[int, Tensor] = {}
    for layout in manifest.layouts:
        slab = slabs[layout.kind]
        for layer, sections in _by_layer(layout).items():
            if any(name.startswith("conv.") for name in sections):
                conv[layer] = section_view(slab, _joined("conv", sections))
            if any(name.startswith("ngram.") for name in sections):
                ngram[layer] = section_view(slab, _joined("ngram", sections))
            if "ssm" in sections:
                ssm[layer] = section_view(slab, sections["ssm"])
            if "norm" in sections:
                norm[layer] = section_view(slab, sections["norm"])
            if "key" in sections:
                key, value = (section_view(slab, sections[name]) for name in ("key", "value"))
                attention[layer] = AttentionState(key, value)
            if "key_scale" in sections:
                # Codes with their scales take the place of pages of numbers.
                names = ("key_scale", "value_scale")
                scales = (section_view(slab, sections[name]) for name in names)
                attention[layer] = CodedAttentionState(key, value, *scales)
            if "latent" in sections:
                latent[layer] = section_view(slab, sections["latent"])
            if "index" in sections:
                index[layer] = section_view(slab, sections["index"])
            if "blocks" in sections:
                blocks[layer] = section_view(slab, sections["blocks"])
            if "hidden" in sections:
                hidden[layer] = section_view(slab, sections["hidden"])
    kernels = in_one_order() if manifest.is_exact_on_card else fastest()
    return ModelState(attention, conv, ssm, norm, latent, index, blocks, hidden, ngram, kernels)


def _by_layer(layout: KindLayout) -> dict[int, dict[str, Section]]:
    by_layer: dict[int, dict[str, Section]] = {}
    for section in layout.sections:
        by_layer.setdefault(section.layer, {})[section.name] = section
    return by_layer


def section_view(slab: Tensor, section: Section) -> Tensor:
    """The section in every slot of `slab`: [slots, *section.shape], in the section's dtype."""
    dtype: torch.dtype = getattr(torch, section.dtype)
    elements = slab.view(dtype)
    begin = section.offset // dtype.itemsize
    end = begin + section.num_bytes // dtype.itemsize
    return elements[:, begin:end].view(len(slab), *section.shape)


def _joined(name: str, sections: Mapping[str, Section]) -> Section:
    """The parts of `name` as one section, which they are in memory."""
    parts = [section for part, section in sections.items() if part.startswith(f"{name}.")]
    _check_side_by_side(parts)
    first = parts[0]
    length = sum(part.shape[0] for part in parts)
    return replace(first, name=name, shape=(length, *first.shape[1:]))


def _check_side_by_side(parts: Sequence[Section]) -> None:
    for before, after in pairwise(parts):
        if before.offset + before.num_bytes != after.offset:
            raise ValueError(
                f"{before.name} and {after.name} of layer {before.layer} do not lie side by side"
            )
