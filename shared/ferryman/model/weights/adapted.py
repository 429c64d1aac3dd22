"""Linear layers with LoRA adapters: y = W·x + up·(down·x) for the rows of an adapter.

The weights are never merged, so requests with different adapters, and with none, share a batch. The
rows of a batch are grouped by adapter (a segment); each layer adds to each segment the product of
its adapter's two small matrices. vLLM and S-LoRA call this a segmented or grouped LoRA product.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from ferryman.errors import ConfigError
from ferryman.model.shapes.batch import AdapterSegment
from ferryman.model.weights.linear import Linear, make_linear
from ferryman.model.weights.matrix import Matrix


@dataclass(frozen=True, slots=True)
class AdapterName:
    """An adapter of a model: its name for clients, and the hex digest of its content."""

    name: str
    digest: str


class ActiveSegments:
    """The segments of the forward that runs, as the layers of one model read them.

    The decoder sets them when a forward begins. A model runs one forward at a time.
    """

    def __init__(self) -> None:
        self.segments: tuple[AdapterSegment, ...] = ()
        self.num_tokens = 0

    def select(self, segments: tuple[AdapterSegment, ...], num_tokens: int) -> None:
        self.segments, self.num_tokens = segments, num_tokens


@dataclass(frozen=True, slots=True)
class ServedAdapters:
    """The adapters of a loaded model, the first of which has the number 1."""

    names: tuple[AdapterName, ...]
    active: ActiveSegments


@dataclass(frozen=True, slots=True)
class LowRank:
    """One adapter's part of a layer: `down` [rank, columns], `up` [rows, rank] with its scale."""

    adapter: int
    down: Tensor
    up: Tensor


@dataclass(frozen=True, slots=True)
class AdaptedMatrix:
    """A weight with the low-rank parts of those adapters that change it, in float64 until the
    product is made in `dtype` on `device`."""

    base: Matrix
    parts: tuple[LowRank, ...]
    active: ActiveSegments
    dtype: torch.dtype
    device: torch.device

    @property
    def shape(self) -> tuple[int, int]:
        return self.base.shape

    @property
    def kind(self) -> Hashable:
        return AdaptedMatrix, self.base.kind

    def narrow(self, axis: int, start: int, length: int) -> AdaptedMatrix:
        if axis == 0:
            parts = [replace(part, up=part.up.narrow(0, start, length)) for part in self.parts]
        else:
            parts = [replace(part, down=part.down.narrow(1, start, length)) for part in self.parts]
        return replace(self, base=self.base.narrow(axis, start, length), parts=tuple(parts))

    def with_rows(self, rows: Tensor) -> AdaptedMatrix:
        parts = tuple(replace(part, up=part.up[rows.to(part.up.device)]) for part in self.parts)
        return replace(self, base=self.base.with_rows(rows), parts=parts)

    def above(self, others: Sequence[Matrix]) -> AdaptedMatrix:
        every = [self, *(other for other in others if isinstance(other, AdaptedMatrix))]
        base = self.base.above([other.base for other in every[1:]])
        return replace(self, base=base, parts=_stacked(every))

    def scaled(self, factor: Tensor) -> AdaptedMatrix:
        parts = tuple(replace(part, up=part.up * factor.to(part.up)) for part in self.parts)
        return replace(self, base=self.base.scaled(factor), parts=parts)

    def dequantised(self) -> Tensor:
        """Raises ConfigError if an adapter changes it: then no tensor is the weight."""
        if self.parts:
            raise ConfigError("an adapter changes a weight that this family uses in another form")
        return self.base.dequantised()

    def linear(self, bias: Tensor | None) -> Linear:
        base = self.base.linear(bias)
        if not self.parts:
            return base
        parts = tuple(
            LowRankProduct(part.adapter, self._linear(part.down), self._linear(part.up))
            for part in self.parts
        )
        return LowRankLinear(base, parts, self.active)

    def _linear(self, part: Tensor) -> Linear:
        # A copy of its own: what was cut off must not be kept.
        return make_linear(part.to(dtype=self.dtype, device=self.device, copy=True))


@dataclass(frozen=True, slots=True)
class LowRankProduct:
    """One adapter's summand of a layer, for any number of its rows."""

    adapter: int
    down: Linear
    up: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))


@dataclass(frozen=True, slots=True)
class LowRankLinear:
    """A product, and for the rows of each adapter the product of its low-rank part."""

    base: Linear
    parts: tuple[LowRankProduct, ...]
    active: ActiveSegments

    def __call__(self, x: Tensor) -> Tensor:
        y, segments = self.base(x), self.active.segments
        if segments:
            assert len(x) == self.active.num_tokens, "an adapted layer gets the rows of the batch"
        for segment in segments:
            for part in self.parts:
                if part.adapter == segment.adapter:
                    y.index_add_(0, segment.rows, part(x[segment.rows]).to(y.dtype))
        return y


def _stacked(matrices: Sequence[AdaptedMatrix]) -> tuple[LowRank, ...]:
    """For each adapter one part over the rows of all matrices: block by block, since each has a
    `down` of its own."""
    lengths = [matrix.shape[0] for matrix in matrices]
    placed = [
        (part, sum(lengths[:index]))
        for index, matrix in enumerate(matrices)
        for part in matrix.parts
    ]
    placed.sort(key=lambda pair: pair[0].adapter)
    low_ranks = []
    for adapter, group in groupby(placed, lambda pair: pair[0].adapter):
        blocks = list(group)
        down = torch.cat([part.down for part, _ in blocks])
        up = down.new_zeros(sum(lengths), len(down))
        column = 0
        for part, row in blocks:
            rows, rank = part.up.shape
            up[row : row + rows, column : column + rank] = part.up
            column += rank
        low_ranks.append(LowRank(adapter, down, up))
    return tuple(low_ranks)
