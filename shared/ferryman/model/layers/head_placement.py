"""The heads of new tokens between their projection and attention: norms, positions, pages.

Where the norms of q and k are of each head alone, and a rotation follows, keys and values are on
their way to pages in one op (`heads_into_pages`). Other families take their own steps before the
pages are written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ferryman.model.layers.decoder_layers import LayerPlace
from ferryman.model.layers.head_norms import (
    NormedHeads,
    NormOfHeads,
    load_head_norms,
    load_plain_head_norm,
)
from ferryman.model.layers.rotation import (
    ClippedHeads,
    GrownQueries,
    Rotary,
    RotaryEmbedding,
    load_rotary,
    without_rotary,
)
from ferryman.model.shapes.attention_shapes import AttentionShape, HeadNorm, ValueSource
from ferryman.model.shapes.state import PagedState
from ferryman.model.weights.named_weights import Weights
from ferryman_kernels.elementwise.heads_into_pages import (
    HeadNorms,
    HeadTurn,
    ProjectedHeads,
    TokenPlaces,
    side_by_side,
)


class HeadPlacement(Protocol):
    """Encodes positions in `heads`, writes k and v to `pages`, and returns q [tokens, q_heads,
    head_dim]."""

    def __call__(self, heads: ProjectedHeads, pages: PagedState, places: TokenPlaces) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class TurnedIntoPages:
    """Norms, rotation and pages in one op."""

    turn: HeadTurn

    def __call__(self, heads: ProjectedHeads, pages: PagedState, places: TokenPlaces) -> Tensor:
        return pages.write_turned(heads, self.turn, places)


@dataclass(frozen=True, slots=True)
class PlacedByParts:
    """`turn`, then `norm_values` [tokens, kv_heads, value_dim], then the pages."""

    turn: RotaryEmbedding
    norm_values: Callable[[Tensor], Tensor]

    def __call__(self, heads: ProjectedHeads, pages: PagedState, places: TokenPlaces) -> Tensor:
        q, k = self.turn(side_by_side(heads.q), heads.k, places.positions)
        v = self.norm_values(heads.v)
        missing = k.shape[2] - v.shape[2]
        pages.write(k, F.pad(v, (0, missing)) if missing else v, *places)
        return q


def unchanged(heads: Tensor) -> Tensor:
    """Values as they are projected."""
    return heads


def load_placement(weights: Weights, shape: AttentionShape, place: LayerPlace) -> HeadPlacement:
    """The norms and positions of the attention under `weights`."""
    turn = load_rotary(weights, shape.positions)
    if shape.clip:
        turn = ClippedHeads(shape.clip, turn)
    if shape.head_norm is not HeadNorm.NONE:
        turn = load_head_norms(weights, shape, place, turn)
    if shape.growth is not None:
        turn = GrownQueries(turn, shape.growth)
    return placement(turn, _value_norm(weights, shape, place))


def placement(
    turn: RotaryEmbedding, norm_values: Callable[[Tensor], Tensor] = unchanged
) -> HeadPlacement:
    """One op for both if there is one."""
    whole = _head_turn(turn, norm_values)
    return PlacedByParts(turn, norm_values) if whole is None else TurnedIntoPages(whole)


def _value_norm(
    weights: Weights, shape: AttentionShape, place: LayerPlace
) -> Callable[[Tensor], Tensor]:
    if shape.values is ValueSource.PROJECTED:
        return partial(torch.clamp, min=-shape.clip, max=shape.clip) if shape.clip else unchanged
    return load_plain_head_norm(weights, shape.head_dim, place.norm_eps)


def _head_turn(turn: RotaryEmbedding, norm_values: Callable[[Tensor], Tensor]) -> HeadTurn | None:
    """`turn` and `norm_values` as one value, or None if no op does both."""
    match turn, norm_values:
        case Rotary(inv_freq, scaling), _ if norm_values is unchanged:
            return HeadTurn(None, inv_freq, scaling)
        case NormedHeads(NormOfHeads(q), NormOfHeads(k), rotation), NormOfHeads(v):
            norms = HeadNorms(q.weight, k.weight, v.weight, q.eps)
        case NormedHeads(NormOfHeads(q), NormOfHeads(k), rotation), _ if norm_values is unchanged:
            norms = HeadNorms(q.weight, k.weight, None, q.eps)
        case _:
            return None
    assert q.eps == k.eps, (q.eps, k.eps)
    if isinstance(rotation, Rotary):
        return HeadTurn(norms, rotation.inv_freq, rotation.scaling)
    return HeadTurn(norms, q.weight.new_empty(0), 1.0) if rotation is without_rotary else None
