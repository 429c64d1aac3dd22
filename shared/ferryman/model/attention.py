"""Grouped-query attention over pages.

q, k, v = x · Wqkv;   q, k turned by position;   k, v written to their pages
y = softmax(scale · q kᵀ + causal mask) v · Wo             (with sinks: one more score a head;
                                                            with a gate: · sigmoid(gate) before Wo)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ferryman.model.batch import DecodeBatch, PrefillBatch
from ferryman.model.layers import Place, RmsNorm, load_norm
from ferryman.model.linear import Linear, make_linear, make_summed
from ferryman.model.ranks import share_of
from ferryman.model.rotary import rotary_frequencies
from ferryman.model.shapes import AttentionShape, NoPositions, RotaryPositions
from ferryman.model.state import AttentionState, ModelState
from ferryman.model.weights import Weights, accumulation_dtype
from ferryman_kernels.paged_attention import paged_attention_decode, paged_attention_prefill
from ferryman_kernels.pages import write_kv
from ferryman_kernels.rotary import apply_rotary

NORM_NAMES = ("q_norm", "k_norm")


class Turning(Protocol):
    """Puts the positions [tokens] into q and k [tokens, heads, head_dim]."""

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class Rotary:
    """Turns pairs of channels by position · `inv_freq` [rotary_dim / 2], and scales them."""

    inv_freq: Tensor
    scaling: float

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return apply_rotary(q, k, positions, self.inv_freq, self.scaling)


@dataclass(frozen=True, slots=True)
class NormedHeads:
    """Norms every head of q and of k before `turn` sees them (Qwen 3, Gemma 3)."""

    q_norm: RmsNorm
    k_norm: RmsNorm
    turn: Turning

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.turn(_each_head(self.q_norm, q), _each_head(self.k_norm, k), positions)


def _each_head(norm: RmsNorm, heads: Tensor) -> Tensor:
    return norm(heads.flatten(0, 1)).view_as(heads)


def leave_unturned(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """No positions ("nope")."""
    return q, k


class OutputGate(Protocol):
    """What lies between the heads' outputs and the product that joins them."""

    def part(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """q [tokens, q_heads, head_dim], and the gate as `pass_through` wants it, out of what
        q_proj yields.
        """
        ...

    def pass_through(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """`mixed` [tokens, q_heads, head_dim] behind the gate."""
        ...


@dataclass(frozen=True, slots=True)
class NoGate:
    """All goes through."""

    def part(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        return projected, projected

    def pass_through(self, mixed: Tensor, gate: Tensor) -> Tensor:
        return mixed


@dataclass(frozen=True, slots=True)
class SigmoidGate:
    """mixed · sigmoid(gate); behind each head of q stands a head of gate (Qwen3-Next)."""

    def part(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        tokens, _, head_dim = projected.shape
        q, gate = projected.reshape(tokens, -1, 2, head_dim).unbind(2)
        return q.contiguous(), gate

    def pass_through(self, mixed: Tensor, gate: Tensor) -> Tensor:
        return mixed * gate.sigmoid()


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention mixer of layer `layer`. `qkv` yields query, key and value heads in a row.

    `sinks` [q_heads] in the accumulation dtype, or None.
    """

    layer: int
    shape: AttentionShape
    qkv: Linear
    turn: Turning
    sinks: Tensor | None
    gate: OutputGate
    out: Linear

    def prefill(self, hidden: Tensor, batch: PrefillBatch, state: ModelState) -> Tensor:
        pages, table = state.attention[self.layer], batch.page_tables[self.shape.kind]
        q, gate = self._write(hidden, pages, table, batch.rows, batch.positions)
        mixed = paged_attention_prefill(
            q,
            pages.key_pages,
            pages.value_pages,
            table,
            batch.spans,
            self.shape.scale,
            self.shape.window_len,
            self.sinks,
        )
        return self.out(self.gate.pass_through(mixed, gate).flatten(1))

    def decode(self, hidden: Tensor, batch: DecodeBatch, state: ModelState) -> Tensor:
        pages, table = state.attention[self.layer], batch.page_tables[self.shape.kind]
        rows = torch.arange(len(hidden), device=hidden.device)
        q, gate = self._write(hidden, pages, table, rows, batch.positions)
        mixed = paged_attention_decode(
            q,
            pages.key_pages,
            pages.value_pages,
            table,
            batch.positions,
            self.shape.scale,
            self.shape.window_len,
            self.sinks,
        )
        return self.out(self.gate.pass_through(mixed, gate).flatten(1))

    def _write(
        self, hidden: Tensor, pages: AttentionState, table: Tensor, rows: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Writes the tokens' keys and values to their pages; returns q, turned, and the gate."""
        shape = self.shape
        heads = self.qkv(hidden).view(len(hidden), -1, shape.head_dim)
        sizes = (shape.projected_heads, shape.kv_heads, shape.kv_heads)
        projected, k, v = heads.split_with_sizes(sizes, dim=1)
        q, gate = self.gate.part(projected)
        q, k = self.turn(q, k, positions)
        write_kv(pages.key_pages, pages.value_pages, k, v, table, rows, positions)
        return q, gate


def load_attention(weights: Weights, shape: AttentionShape, place: Place) -> Attention:
    """The attention whose projections lie under `weights`, q, k and v joined into one product.

    A rank holds its heads of q, and the heads of k and v that those read.
    """
    hidden_dim = place.hidden_dim
    group = weights.group
    heads = {"q_proj": shape.q_heads, "k_proj": shape.kv_heads, "v_proj": shape.kv_heads}
    out_dims = {"q_proj": shape.projected_heads * shape.head_dim}

    def joined(suffix: str, *in_dim: int) -> Tensor:
        parts = []
        for name, count in heads.items():
            out_dim = out_dims.get(name, count * shape.head_dim)
            part = weights.tensor(f"{name}.{suffix}", out_dim, *in_dim)
            parts.append(share_of(part, count, group))
        return torch.cat(parts)

    bias, out_bias = None, None
    if shape.has_bias:
        bias, out_bias = joined("bias"), weights.tensor("o_proj.bias", hidden_dim)
    out = weights.tensor("o_proj.weight", hidden_dim, shape.q_heads * shape.head_dim)
    return Attention(
        layer=place.layer,
        shape=shape.shard(group.num_ranks),
        qkv=make_linear(joined("weight", hidden_dim), bias),
        turn=_prepared(weights, shape, place),
        sinks=_sinks(weights, shape) if shape.has_sinks else None,
        gate=SigmoidGate() if shape.gates_output else NoGate(),
        out=make_summed(share_of(out, shape.q_heads, group, axis=1), out_bias, group),
    )


def _sinks(weights: Weights, shape: AttentionShape) -> Tensor:
    sinks = weights.precise("sinks", shape.q_heads)
    return share_of(sinks, shape.q_heads, weights.group).contiguous()


def _prepared(weights: Weights, shape: AttentionShape, place: Place) -> Turning:
    """What happens to q and k between their projection and their pages."""
    turn = load_turning(weights, shape.positions)
    if not shape.norms_heads:
        return turn
    q_norm, k_norm = (
        load_norm(weights, name, shape.head_dim, place.norm_eps, place.norm_origin)
        for name in NORM_NAMES
    )
    return NormedHeads(q_norm, k_norm, turn)


def load_turning(weights: Weights, positions: RotaryPositions | NoPositions) -> Turning:
    """How `positions` enter q and k, in the accumulation dtype of `weights`."""
    if isinstance(positions, NoPositions):
        return leave_unturned
    like = torch.empty(0, dtype=accumulation_dtype(weights.dtype), device=weights.device)
    found = rotary_frequencies(positions.theta, positions.rotary_dim, positions.stretch, like=like)
    return Rotary(*found)
