"""MLPs: down(act(gate) · up), and down(act(up)) without a gate; each token alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ferryman.model.shapes.feed_forward_shapes import MlpShape
from ferryman.model.shapes.ranks import Cuttable, Group, slice_of
from ferryman.model.weights.linear import Linear
from ferryman.model.weights.matrix import Matrix, join_linear, split_rows, summed_linear
from ferryman.model.weights.named_weights import Weights
from ferryman_kernels.elementwise.activations import silu
from ferryman_kernels.elementwise.gates.clamped_swiglu import clamped_swiglu
from ferryman_kernels.elementwise.gates.gated_silu import gated_silu
from ferryman_kernels.elementwise.gates.limited_silu import limited_silu


@dataclass(frozen=True, slots=True)
class GatedActivation:
    """act(gate) · up of one product's outputs [tokens, 2 · inner_dim], gate's first."""

    act: Callable[[Tensor], Tensor] = silu

    def __call__(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act(gate) * up


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """(up + added) · gate · sigmoid(alpha · gate), both cut at `limit`; gate's channels come
    first. gpt-oss and MiniMax M3 add 1, HY V4 nothing."""

    alpha: float
    limit: float
    added: float

    def __call__(self, gate_up: Tensor) -> Tensor:
        return clamped_swiglu(gate_up, self.alpha, self.limit, self.added)


def gated_by(
    act: Callable[[Tensor], Tensor] | ClampedSwiglu, limit: float = 0.0
) -> Callable[[Tensor], Tensor]:
    """The activation act(gate) · up, or one that takes both; for silu it is one operation, with or
    without a limit."""
    if limit:
        assert act is silu, "no other activation has a limit"
        return partial(limited_silu, limit=limit)
    if isinstance(act, ClampedSwiglu):
        return act
    return gated_silu if act is silu else GatedActivation(act)


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(act(gate) · up), gate and up from one product: gate's rows come first."""

    gate_up: Linear
    down: Linear
    activation: Callable[[Tensor], Tensor] = gated_silu

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.down(self.activation(self.gate_up(hidden)))


def gate_and_up(gate_up: Cuttable, group: Group) -> list[Cuttable]:
    """A rank's rows of gate, the first half of `gate_up`, and those of up, the second."""
    halves = split_rows(gate_up, [gate_up.shape[0] // 2] * 2)
    return [slice_of(half, group) for half in halves]


def _gate_and_up(weights: Weights, shape: MlpShape, hidden_dim: int) -> list[Matrix]:
    """A rank's rows of gate and up, which are stored as two weights or as one (Phi 3)."""
    if weights.has_module("gate_up_proj"):
        whole = weights.matrix("gate_up_proj.weight", 2 * shape.inner_dim, hidden_dim)
        return gate_and_up(whole, weights.group)
    names = ("gate_proj.weight", "up_proj.weight")
    parts = [weights.matrix(name, shape.inner_dim, hidden_dim) for name in names]
    return [slice_of(part, weights.group) for part in parts]


def _gate_and_up_bias(weights: Weights, shape: MlpShape) -> Tensor:
    if weights.has("gate_up_proj.bias"):
        whole = weights.tensor("gate_up_proj.bias", 2 * shape.inner_dim)
        return torch.cat(gate_and_up(whole, weights.group))
    rank_slice = partial(slice_of, group=weights.group)
    names = ("gate_proj.bias", "up_proj.bias")
    return torch.cat([weights.tensor(name, shape.inner_dim, part=rank_slice) for name in names])


def load_gated_mlp(
    weights: Weights,
    shape: MlpShape,
    hidden_dim: int,
    act: Callable[[Tensor], Tensor] | ClampedSwiglu = silu,
) -> GatedMlp:
    """The MLP of gate_proj, up_proj and down_proj under `weights`."""
    group = weights.group
    bias, down_bias = None, None
    if shape.has_bias:
        bias = _gate_and_up_bias(weights, shape)
        down_bias = weights.tensor("down_proj.bias", hidden_dim)
    down = weights.matrix("down_proj.weight", hidden_dim, shape.inner_dim)
    return GatedMlp(
        join_linear(_gate_and_up(weights, shape, hidden_dim), bias),
        summed_linear(slice_of(down, group, axis=1), down_bias, group),
        gated_by(act, shape.limit),
    )


def squared_relu(up: Tensor) -> Tensor:
    """The square of what is above 0 (Nemotron-H, AFM)."""
    return F.relu(up).square()


UP_DOWN = ("up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class UngatedMlp:
    """Hidden [tokens, hidden_dim] in and out; `act` sees [tokens, inner_dim] of a rank."""

    up: Linear
    down: Linear
    act: Callable[[Tensor], Tensor]

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.down(self.act(self.up(hidden)))


def load_ungated_mlp(
    weights: Weights,
    shape: MlpShape,
    hidden_dim: int,
    act: Callable[[Tensor], Tensor],
    names: tuple[str, str] = UP_DOWN,
) -> UngatedMlp:
    """The MLP under `weights`, whose products have `names`. A rank has a part of inner_dim."""
    group, (up_name, down_name) = weights.group, names
    up = weights.matrix(f"{up_name}.weight", shape.inner_dim, hidden_dim)
    down = weights.matrix(f"{down_name}.weight", hidden_dim, shape.inner_dim)
    bias, down_bias = None, None
    if shape.has_bias:
        rank_slice = partial(slice_of, group=group)
        bias = weights.tensor(f"{up_name}.bias", shape.inner_dim, part=rank_slice)
        down_bias = weights.tensor(f"{down_name}.bias", hidden_dim)
    return UngatedMlp(
        slice_of(up, group).linear(bias),
        summed_linear(slice_of(down, group, axis=1), down_bias, group),
        act,
    )
