"""Norms of q and k between their projection and their pages.

EACH_HEAD      q, k = rotated(norm(head))      of every head alone      (Qwen 3, Gemma 3)
OWN_CENTRED    the same, each head by weights of its own, around the mean   (StableLM 2, Command R)
ROTATED_HEAD   q, k = norm(rotated(head))      of every head alone      (Hunyuan)
ALL_HEADS      q, k = rotated(norm(row))       the row is all heads     (OLMo 2)

ROTATED_WITHOUT_WEIGHTS is ROTATED_HEAD with weights of one (Llama 4).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ferryman.model.layers.centred_norm import load_centred_heads
from ferryman.model.layers.decoder_layers import LayerPlace, Norm, RmsNorm, load_norm
from ferryman.model.layers.gating import SharedNorm
from ferryman.model.layers.rotation import RotaryEmbedding, halves_apart
from ferryman.model.shapes.attention_shapes import AttentionShape, HeadNorm
from ferryman.model.shapes.ranks import share_of
from ferryman.model.weights.named_weights import Weights, accumulation_dtype

HeadsNorm = Callable[[Tensor], Tensor]
"""A norm of each head: [tokens, heads, head_dim] in and out."""

NAMES = (("q_norm", "query_layernorm"), ("k_norm", "key_layernorm"))
"""The names of the two norms; the second of each is Hunyuan's."""


@dataclass(frozen=True, slots=True)
class NormedHeads:
    """Norms every head of q and of k before `turn` rotates them."""

    q_norm: HeadsNorm
    k_norm: HeadsNorm
    turn: RotaryEmbedding

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.turn(self.q_norm(q), self.k_norm(k), positions)


@dataclass(frozen=True, slots=True)
class NormedRotatedHeads:
    """Norms every head of q and of k after `turn` rotated them."""

    q_norm: HeadsNorm
    k_norm: HeadsNorm
    turn: RotaryEmbedding

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        q, k = self.turn(q, k, positions)
        return self.q_norm(q), self.k_norm(k)


@dataclass(frozen=True, slots=True)
class NormOfRow:
    """`norm` of all heads as one row: [tokens, heads, head_dim] in and out."""

    norm: Norm

    def __call__(self, heads: Tensor) -> Tensor:
        return self.norm(heads.flatten(1)).view_as(heads)


@dataclass(frozen=True, slots=True)
class RowOverRanks:
    """The norm of a row of heads of which this rank holds a share."""

    norm: SharedNorm

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden.to(self.norm.weight.dtype)).to(hidden.dtype)


@dataclass(frozen=True, slots=True)
class NormOfHeads:
    """`norm` of every head alone: [tokens, heads, head_dim] in and out."""

    norm: RmsNorm

    def __call__(self, heads: Tensor) -> Tensor:
        return self.norm(heads.flatten(0, 1)).view_as(heads)


def load_head_norms(
    weights: Weights, shape: AttentionShape, place: LayerPlace, turn: RotaryEmbedding
) -> NormedHeads | NormedRotatedHeads:
    """The norms that `shape` names, around the rotation `turn`."""
    if shape.head_norm is HeadNorm.ALL_HEADS:
        q_norm, k_norm = (
            _load_row_norm(weights, name, count, shape.head_dim, place.norm_eps)
            for (name, _), count in zip(NAMES, (shape.q_heads, shape.kv_heads), strict=True)
        )
        return NormedHeads(NormOfRow(q_norm), NormOfRow(k_norm), turn)
    if shape.head_norm is HeadNorm.OWN_CENTRED:
        return _load_own_norms(weights, shape, place, turn)
    if shape.head_norm is HeadNorm.ROTATED_WITHOUT_WEIGHTS:
        norm = load_plain_head_norm(weights, shape.head_dim, place.norm_eps)
        return NormedRotatedHeads(norm, norm, turn)
    q, k = (
        load_norm(
            weights,
            weights.first_of(*(f"{name}.weight" for name in names)).removesuffix(".weight"),
            shape.head_dim,
            place.norm_eps,
            place.norm_origin,
        )
        for names in NAMES
    )
    if shape.head_norm is HeadNorm.ROTATED_HEAD:
        return NormedRotatedHeads(NormOfHeads(q), NormOfHeads(k), turn)
    return NormedHeads(NormOfHeads(q), NormOfHeads(k), turn)


def _load_own_norms(
    weights: Weights, shape: AttentionShape, place: LayerPlace, turn: RotaryEmbedding
) -> NormedHeads:
    is_joint = weights.has("q_norm.weight")
    names = ("q_norm", "k_norm") if is_joint else ("q_layernorm", "k_layernorm")
    q_norm, k_norm = (
        load_centred_heads(weights, name, count, shape.head_dim, place.norm_eps).ordered(
            halves_apart(shape.positions, shape.head_dim)
        )
        for name, count in zip(names, (shape.q_heads, shape.kv_heads), strict=True)
    )
    return NormedHeads(q_norm, k_norm, turn)


def load_plain_head_norm(weights: Weights, head_dim: int, eps: float) -> NormOfHeads:
    """The norm whose weights are one: nothing is read but the dtype and device of `weights`."""
    wide = accumulation_dtype(weights.dtype)
    return NormOfHeads(RmsNorm(torch.ones(head_dim, dtype=wide, device=weights.device), eps))


def _load_row_norm(weights: Weights, name: str, heads: int, head_dim: int, eps: float) -> Norm:
    """A norm over the heads of all ranks. Ranks that hold the same head count it equally often, so
    the mean is that of one row."""
    group = weights.group
    if group.num_ranks == 1:
        return load_norm(weights, name, heads * head_dim, eps)
    rank_heads = partial(share_of, heads=heads, group=group)
    weight = weights.precise(f"{name}.weight", heads * head_dim, part=rank_heads)
    return RowOverRanks(SharedNorm(weight, eps, 1, group))
