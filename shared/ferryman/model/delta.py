"""The gated delta net (Yang, Kautz & Hatamizadeh 2024) over slot-indexed state, as Qwen builds it.

q k v, z, b, a = u · Win
q, k, v        = silu(conv(q k v));   q, k to length one, head by head;   q / √k_dim
β, g           = sigmoid(b), -exp(A_log)·softplus(a + dt_bias)
y              = gated delta rule of q, k, v with decay exp(g) and rate β
out            = norm(y) · silu(z) · Wout                                a norm for each value head
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ferryman.model.batch import DecodeBatch, PrefillBatch
from ferryman.model.gating import GateBehindNorm
from ferryman.model.layers import Place
from ferryman.model.linear import Linear, make_linear, make_summed
from ferryman.model.ranks import Group, share_of
from ferryman.model.shapes import DeltaLayout, DeltaShape
from ferryman.model.state import ModelState
from ferryman.model.weights import Weights
from ferryman_kernels.causal_conv import causal_conv_decode, causal_conv_prefill
from ferryman_kernels.delta_chunk_scan import delta_chunk_scan
from ferryman_kernels.delta_decode import delta_decode
from ferryman_kernels.rms_norm import rms_norm

LENGTH_EPS = 1e-6
"""Added to the square of a key's length before it is divided by it."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What β and g are computed with: `decay` (exp(A_log)), `dt_bias` [v_heads], both in the
    accumulation dtype.
    """

    decay: Tensor
    dt_bias: Tensor

    def __call__(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """The log decay g, at most 0, and β, in the accumulation dtype; all [tokens, v_heads]."""
        wide = self.decay.dtype
        return F.softplus(a.to(wide) + self.dt_bias) * -self.decay, b.to(wide).sigmoid()


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """The recurrent mixer of layer `layer`. `scan_chunk` is the absolute grid of the scan.

    `conv_weight` [conv_dim, conv_width] and `unit` [k_dim], all 1/√k_dim, are in the accumulation
    dtype.
    """

    layer: int
    shape: DeltaShape
    scan_chunk: int
    project_in: Linear
    conv_weight: Tensor
    unit: Tensor
    rates: Rates
    gate: GateBehindNorm
    project_out: Linear

    def prefill(self, hidden: Tensor, batch: PrefillBatch, state: ModelState) -> Tensor:
        slots = state.recurrent[self.layer]
        places = batch.spans, batch.working_slots, batch.snapshots
        mixed, z, a, b = self._project(hidden)
        mixed = causal_conv_prefill(mixed, slots.conv_states, self.conv_weight, None, *places)
        q, k, v = self._heads(mixed)
        g, beta = self.rates(a, b)
        y = delta_chunk_scan(q, k, v, g, beta, slots.ssm_states, *places, self.scan_chunk)
        return self.project_out(self.gate(y.flatten(1), z))

    def decode(self, hidden: Tensor, batch: DecodeBatch, state: ModelState) -> Tensor:
        slots = state.recurrent[self.layer]
        mixed, z, a, b = self._project(hidden)
        g, beta = self.rates(a, b)

        def advance(wave: slice) -> Tensor:
            places = batch.read_slots[wave], batch.write_slots[wave]
            convolved = causal_conv_decode(
                mixed[wave], slots.conv_states, self.conv_weight, None, *places
            )
            q, k, v = self._heads(convolved)
            return delta_decode(slots.ssm_states, q, k, v, g[wave], beta[wave], *places)

        y = batch.wave_by_wave(advance)
        return self.project_out(self.gate(y.flatten(1), z))

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q k v [tokens, conv_dim], z [tokens, value_dim], a and b [tokens, v_heads]."""
        shape = self.shape
        mixed, z, b, a = self.project_in(hidden).split_with_sizes(
            (shape.conv_dim, shape.value_dim, shape.v_heads, shape.v_heads), dim=1
        )
        return mixed, z, a, b

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q and k [tokens, k_heads, k_dim] of length 1/√k_dim and 1, in the accumulation dtype; v
        [tokens, v_heads, v_dim].

        x / √(Σx² + eps) is the norm of root mean squares with eps / k_dim, divided by √k_dim.
        """
        shape, dim = self.shape, self.shape.k_dim
        keys, v = mixed.split_with_sizes((2 * shape.key_dim, shape.value_dim), dim=1)
        rows = keys.to(self.unit.dtype).reshape(-1, dim)
        units = rms_norm(rows, self.unit, LENGTH_EPS / dim).view(len(mixed), 2, shape.k_heads, dim)
        q, k = units.unbind(1)
        return q * dim**-0.5, k, v.reshape(-1, shape.v_heads, shape.v_dim)


def load_delta(weights: Weights, shape: DeltaShape, place: Place) -> DeltaNet:
    """The gated delta net whose tensors lie under `weights`: a rank's value heads, and the key
    heads that those read.
    """
    group = weights.group
    own = shape.shard(group.num_ranks)
    conv = weights.precise("conv1d.weight", shape.conv_dim, 1, shape.conv_width).squeeze(1)
    conv_parts = conv.split_with_sizes((shape.key_dim, shape.key_dim, shape.value_dim))
    out = weights.tensor("out_proj.weight", place.hidden_dim, shape.value_dim)
    decay, dt_bias = (
        share_of(weights.precise(name, shape.v_heads), shape.v_heads, group).contiguous()
        for name in ("A_log", "dt_bias")
    )
    norm_weight = weights.precise("norm.weight", shape.v_dim).repeat(own.v_heads)
    return DeltaNet(
        layer=place.layer,
        shape=own,
        scan_chunk=place.scan_chunk,
        project_in=make_linear(_cut(_in_rows(weights, shape, place.hidden_dim), shape, group)),
        conv_weight=_cut(conv_parts, shape, group),
        unit=conv.new_full((shape.k_dim,), shape.k_dim**-0.5),
        rates=Rates(decay.exp(), dt_bias),
        gate=GateBehindNorm(norm_weight, place.norm_eps, own.v_heads),
        project_out=make_summed(share_of(out, shape.v_heads, group, axis=1), None, group),
    )


def _cut(parts: Sequence[Tensor], shape: DeltaShape, group: Group) -> Tensor:
    """A rank's heads of q, k, v and what else has value heads, one behind the other."""
    heads = (shape.k_heads, shape.k_heads, *(shape.v_heads for _ in parts[2:]))
    return torch.cat(
        [share_of(part, count, group) for part, count in zip(parts, heads, strict=True)]
    )


def _in_rows(weights: Weights, shape: DeltaShape, hidden_dim: int) -> Sequence[Tensor]:
    """The rows of the in-projection for q, k, v, z, b and a, heads in their order."""
    key, value, per_key = shape.key_dim, shape.value_dim, shape.v_heads // shape.k_heads
    if shape.layout is DeltaLayout.BY_ROLE:
        sizes = {"qkv": shape.conv_dim, "z": value, "b": shape.v_heads, "a": shape.v_heads}
        qkv, *others = (
            weights.tensor(f"in_proj_{role}.weight", size, hidden_dim)
            for role, size in sizes.items()
        )
        return [*qkv.split_with_sizes((key, key, value)), *others]
    qkvz = weights.tensor("in_proj_qkvz.weight", 2 * (key + value), hidden_dim)
    ba = weights.tensor("in_proj_ba.weight", 2 * shape.v_heads, hidden_dim)
    values = per_key * shape.v_dim
    return [
        *_by_role(qkvz, shape.k_heads, (shape.k_dim, shape.k_dim, values, values)),
        *_by_role(ba, shape.k_heads, (per_key, per_key)),
    ]


def _by_role(rows: Tensor, k_heads: int, sizes: tuple[int, ...]) -> list[Tensor]:
    """Parts of `sizes` of each key head, gathered from all key heads."""
    by_head = rows.view(k_heads, -1, rows.shape[1])
    return [part.flatten(0, 1) for part in by_head.split_with_sizes(sizes, dim=1)]
