"""Hyper-connections: a residual path of several streams [tokens, streams, hidden_dim].

A part of a layer, its attention or its feed-forward, reads one row of them and writes to each:

x       = Σ_s read_s · stream_s;    y = part(norm(x))
stream_s ← stream_s + written_s · y

The gates `read` and `written` are computed from all of a token's streams (`hyper_connection.py` has
the formula). All streams begin as the embedding, and the final norm reads one row of them by gates
of its own. In DeepSeek-V4 a matrix of the token also mixes the streams with each other:

stream_s ← Σ_r matrix_rs · stream_r + written_s · y
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ferryman.model.layers.decoder_layers import Norm, Residual
from ferryman.model.shapes.model_shapes import TrunkShape
from ferryman.model.weights.linear import Linear, make_linear
from ferryman.model.weights.named_weights import Weights, accumulation_dtype
from ferryman_kernels.elementwise.streams.hyper_connection import (
    NO_MATRIX,
    Balance,
    GateNumbers,
    expand_streams,
    mix_streams,
    read_streams,
)


@dataclass(frozen=True, slots=True)
class HyperShape:
    """`count` streams; gates that write lie between 0 and `magnitude`, plus `eps` as all gates."""

    count: int
    magnitude: float
    eps: float


@dataclass(frozen=True, slots=True)
class MixedShape:
    """`count` streams that are mixed with each other, by matrices that `rounds` make doubly
    stochastic. `eps` is added to gates that read, and to all that is divided by."""

    count: int
    rounds: int
    eps: float


StreamWriter = Callable[[Tensor, Tensor, Tensor], Tensor]
"""New streams from old ones, a part's output and the gates for writing it to them, behind which a
matrix stands where streams are mixed."""


@dataclass(frozen=True, slots=True)
class StreamGates:
    """The gates of a part; `mix` takes the accumulation dtype."""

    mix: Linear
    numbers: GateNumbers

    def read(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """The row [tokens, hidden_dim] that is read, and all gates [tokens, gates], with a matrix
        behind them where streams are mixed."""
        wide = accumulation_dtype(streams.dtype)
        return read_streams(streams, self.mix(streams.flatten(1).to(wide)), self.numbers)

    @property
    def write(self) -> StreamWriter:
        return mix_streams if self.numbers.balance.rounds else expand_streams


@dataclass(frozen=True, slots=True)
class StreamResidual:
    """The streams beside a part, and its gates [tokens, streams] for writing to them, with a matrix
    behind them where `write` mixes streams."""

    streams: Tensor
    gates: Tensor
    write: StreamWriter = expand_streams

    def plus(self, output: Tensor) -> Tensor:
        return self.write(self.streams, output, self.gates)


@dataclass(frozen=True, slots=True)
class HyperPath:
    """The path around a part that reads `norm` of a row of the streams."""

    gates: StreamGates
    norm: Norm

    def entered(self, hidden: Tensor) -> tuple[Tensor, Residual]:
        x, gates = self.gates.read(hidden)
        return self.norm(x), StreamResidual(hidden, gates[:, hidden.shape[1] :], self.gates.write)


@dataclass(frozen=True, slots=True)
class CopiedStreams:
    """The hidden state [tokens, hidden_dim] as each of `count` streams."""

    count: int

    def __call__(self, hidden: Tensor) -> Tensor:
        return hidden[:, None].expand(-1, self.count, -1).contiguous()


@dataclass(frozen=True, slots=True)
class ReadStreamsNorm:
    """The final norm: of the row that its gates read of the streams."""

    gates: StreamGates
    norm: Norm

    def __call__(self, hidden: Tensor) -> Tensor:
        """[tokens, hidden_dim] for `hidden` [tokens, streams, hidden_dim]."""
        return self.norm(self.gates.read(hidden)[0])


GateNames = tuple[str, str, str]
"""A checkpoint's names for the product of gates, what is added to it, and its scales."""


def load_part_gates(
    weights: Weights, names: GateNames, shape: HyperShape, trunk: TrunkShape
) -> StreamGates:
    """Gates that read and gates that write, under `weights`. The first scale is that of all gates
    that read, the second that of the others."""
    scales = weights.precise(names[2], 2).repeat_interleave(shape.count)
    factors = torch.ones_like(scales)
    factors[shape.count :] = shape.magnitude
    numbers = OfGates(scales, factors, torch.zeros_like(scales) + shape.eps)
    return _gates(weights, names, numbers, shape.count, trunk)


MIXED_MAGNITUDE = 2.0
"""The greatest gate that writes to streams that are mixed."""


def load_mixed_gates(
    weights: Weights, names: GateNames, shape: MixedShape, trunk: TrunkShape
) -> StreamGates:
    """Gates that read, gates that write, and the matrix; each of the three has a scale."""
    count = shape.count
    three = weights.precise(names[2], 3)
    lengths = (count, count, count * count)
    scales = torch.cat([three[i : i + 1].repeat(length) for i, length in enumerate(lengths)])
    factors, added = torch.ones_like(scales[: 2 * count]), torch.zeros_like(scales[: 2 * count])
    factors[count:], added[:count] = MIXED_MAGNITUDE, shape.eps
    balance = Balance(shape.rounds, shape.eps)
    return _gates(weights, names, OfGates(scales, factors, added), count, trunk, balance)


def load_end_gates(
    weights: Weights, names: GateNames, shape: HyperShape | MixedShape, trunk: TrunkShape
) -> StreamGates:
    """Gates that read alone, as those of the final norm."""
    scales = weights.precise(names[2], 1).repeat_interleave(shape.count)
    numbers = OfGates(scales, torch.ones_like(scales), torch.zeros_like(scales) + shape.eps)
    return _gates(weights, names, numbers, shape.count, trunk)


class OfGates(NamedTuple):
    """The scale of each logit, and of each gate what its sigmoid is multiplied by and what is added
    to it."""

    scales: Tensor
    factors: Tensor
    added: Tensor


def _gates(
    weights: Weights,
    names: GateNames,
    of_gates: OfGates,
    count: int,
    trunk: TrunkShape,
    balance: Balance = NO_MATRIX,
) -> StreamGates:
    scales, factors, added = of_gates
    mix = weights.precise(names[0], len(scales), count * trunk.hidden_dim)
    base = weights.precise(names[1], len(scales))
    numbers = GateNumbers(scales, base, factors, added, trunk.norm_eps, balance)
    return StreamGates(make_linear(mix), numbers)
