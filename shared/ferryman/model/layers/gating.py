"""The gate of a Mamba-2 mixer on the output of the scan: with or without a norm, in either order.

    norm(y · silu(gate))      norm(y) · silu(gate)      y · silu(gate)

That of a gated delta net, and of lightning attention, may be norm(y) · sigmoid(gate).

The norm is over each group of channels. With fewer groups than ranks, the channels of a group are
on several ranks: each rank sends the others the sum of squares of its own channels, one number for
each token and group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ferryman.cache.shards import piece_of
from ferryman.model.shapes.ranks import Group, share_of
from ferryman.model.shapes.recurrent_shapes import Gating, MambaShape
from ferryman.model.weights.named_weights import Weights
from ferryman_kernels.elementwise.activations import sigmoid, silu
from ferryman_kernels.elementwise.rms_norm import (
    gated_rms_norm,
    grouped_rms_norm,
    rms_norm_then_gate,
)


class ScanGate(Protocol):
    """Joins a rank's channels of the scan's output and of the gate, both [tokens, inner_dim]."""

    def __call__(self, y: Tensor, gate: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class GateThenNorm:
    """norm(y · silu(gate)), a norm for each of `groups`; weight in the accumulation dtype."""

    weight: Tensor
    eps: float
    groups: int

    def __call__(self, y: Tensor, gate: Tensor) -> Tensor:
        return gated_rms_norm(y, gate, self.weight, self.eps, self.groups)


@dataclass(frozen=True, slots=True)
class NormThenGate:
    """norm(y) · silu(gate), a norm for each of `groups` (Falcon-H1)."""

    weight: Tensor
    eps: float
    groups: int

    def __call__(self, y: Tensor, gate: Tensor) -> Tensor:
        return rms_norm_then_gate(y, gate, self.weight, self.eps, self.groups)


@dataclass(frozen=True, slots=True)
class NormThenSigmoid:
    """norm(y) · sigmoid(gate), a norm for each of `groups` (Qwen 4, Ling 2.5)."""

    weight: Tensor
    eps: float
    groups: int

    def __call__(self, y: Tensor, gate: Tensor) -> Tensor:
        wide = self.weight.dtype
        normed = grouped_rms_norm(y.to(wide), self.weight, self.eps, self.groups)
        return (normed * sigmoid(gate.to(wide))).to(y.dtype)


def gate_alone(y: Tensor, gate: Tensor) -> Tensor:
    """y · silu(gate), without a norm (Falcon-H1)."""
    return y * silu(gate)


@dataclass(frozen=True, slots=True)
class SharedNorm:
    """The norm over one of the model's `num_groups` groups: this rank's channels and other ranks'.

    `weight` [inner_dim / ranks] is this rank's, in the accumulation dtype.
    """

    weight: Tensor
    eps: float
    num_groups: int
    group: Group

    def __call__(self, wide: Tensor) -> Tensor:
        num_ranks = self.group.num_ranks
        group_index = piece_of(self.num_groups, self.group.rank, num_ranks)
        squares = wide.new_zeros(len(wide), self.num_groups)
        squares[:, group_index] = wide.square().sum(-1)
        num_channels = wide.shape[1] * num_ranks // self.num_groups
        mean = self.group.summed(squares)[:, group_index : group_index + 1] / num_channels
        return wide * torch.rsqrt(mean + self.eps) * self.weight


@dataclass(frozen=True, slots=True)
class GateThenSharedNorm:
    """`GateThenNorm` for groups that extend over several ranks."""

    norm: SharedNorm

    def __call__(self, y: Tensor, gate: Tensor) -> Tensor:
        wide = self.norm.weight.dtype
        return self.norm(y.to(wide) * silu(gate.to(wide))).to(y.dtype)


@dataclass(frozen=True, slots=True)
class SharedNormThenGate:
    """`NormThenGate`, or `NormThenSigmoid`, for groups that extend over several ranks."""

    norm: SharedNorm
    activation: Callable[[Tensor], Tensor]

    def __call__(self, y: Tensor, gate: Tensor) -> Tensor:
        wide = self.norm.weight.dtype
        return (self.norm(y.to(wide)) * self.activation(gate.to(wide))).to(y.dtype)


def load_sigmoid_gate(
    weights: Weights, name: str, inner_dim: int, groups: int, eps: float
) -> ScanGate:
    """norm(y) · sigmoid(gate) of a rank's part of `inner_dim` channels in `groups`; `name` is that
    of the norm's weight."""
    group = weights.group
    channels = partial(share_of, heads=inner_dim, group=group)
    weight = weights.precise(name, inner_dim, part=channels)
    if groups % group.num_ranks == 0:
        return NormThenSigmoid(weight, eps, groups // group.num_ranks)
    return SharedNormThenGate(SharedNorm(weight, eps, groups, group), sigmoid)


def load_gate(weights: Weights, shape: MambaShape, eps: float) -> ScanGate:
    """The gate of the mixer under `weights`; `shape` is the undivided one."""
    if shape.gating is Gating.GATE_ALONE:
        return gate_alone
    group, groups = weights.group, shape.ssm_groups
    heads = partial(share_of, heads=shape.ssm_heads, group=group)
    weight = weights.precise("norm.weight", shape.inner_dim, part=heads)
    norm_is_first = shape.gating is Gating.NORM_THEN_GATE
    if groups % group.num_ranks == 0:
        rank_groups = groups // group.num_ranks
        return (NormThenGate if norm_is_first else GateThenNorm)(weight, eps, rank_groups)
    norm = SharedNorm(weight, eps, groups, group)
    return SharedNormThenGate(norm, silu) if norm_is_first else GateThenSharedNorm(norm)
