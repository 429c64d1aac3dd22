"""The weight of a linear layer before it is made ready to multiply by, plain or quantised.

Loaders cut, reorder and join matrices without knowing which of the two they have.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from ferryman.model.shapes.ranks import Cuttable, Group, share_of
from ferryman.model.weights.linear import Linear, StackedLinear, SummedLinear, make_linear


class Matrix(Protocol):
    """The weight [rows, columns] of a product with `columns` inputs and `rows` outputs."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def kind(self) -> Hashable:
        """Matrices of one kind and as many columns can be joined."""
        ...

    def narrow(self, axis: int, start: int, length: int) -> Matrix:
        """A part of the rows (`axis` 0) or of the columns (1)."""
        ...

    def with_rows(self, rows: Tensor) -> Matrix:
        """The rows at the indices `rows`, in their order."""
        ...

    def above(self, others: Sequence[Matrix]) -> Matrix:
        """This matrix's rows, then those of `others`, which are of its kind."""
        ...

    def scaled(self, factor: Tensor) -> Matrix:
        """Multiplied by one number, or by one for each row [rows, 1]."""
        ...

    def dequantised(self) -> Tensor:
        """The numbers it stands for, in the model's dtype."""
        ...

    def linear(self, bias: Tensor | None) -> Linear:
        """The product with it, plus `bias` [rows]; holds copies in the device's best form."""
        ...


@dataclass(frozen=True, slots=True)
class PlainMatrix:
    """A matrix of floats, `stored` in any float dtype, for a model in `dtype` on `device`.

    `stored` may be a view of a file: it is copied when the product is made, after all cuts.
    """

    stored: Tensor
    dtype: torch.dtype
    device: torch.device

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.stored.shape
        return rows, columns

    @property
    def kind(self) -> Hashable:
        return PlainMatrix

    def narrow(self, axis: int, start: int, length: int) -> PlainMatrix:
        return replace(self, stored=self.stored.narrow(axis, start, length))

    def with_rows(self, rows: Tensor) -> PlainMatrix:
        return replace(self, stored=self.stored[rows])

    def above(self, others: Sequence[Matrix]) -> PlainMatrix:
        below = [other.stored for other in others if isinstance(other, PlainMatrix)]
        return replace(self, stored=torch.cat([self.stored, *below]))

    def scaled(self, factor: Tensor) -> PlainMatrix:
        wide = self.stored.to(torch.float64 if self.dtype is torch.float64 else torch.float32)
        return replace(self, stored=wide * factor.to(wide))

    def dequantised(self) -> Tensor:
        rounded = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        return rounded.copy_(self.stored)

    def linear(self, bias: Tensor | None) -> Linear:
        return make_linear(self.dequantised(), bias)


def split_rows(whole: Cuttable, sizes: Iterable[int]) -> list[Cuttable]:
    """Parts of so many rows, one below the other."""
    parts, start = [], 0
    for size in sizes:
        parts.append(whole.narrow(0, start, size))
        start += size
    return parts


def equal_shares(whole: Cuttable, count: int, group: Group) -> list[Cuttable]:
    """A rank's share of each of `count` parts of one length, which stand one below the other."""
    length = whole.shape[0] // count
    return [share_of(part, length, group) for part in split_rows(whole, [length] * count)]


def join_linear(parts: Sequence[Matrix], bias: Tensor | None = None) -> Linear:
    """One product whose outputs are those of `parts`, in their order.

    Neighbours of one kind become one matrix. A checkpoint may quantise some of the parts alone.
    """
    joined = joined_runs(parts)
    lengths = [matrix.shape[0] for matrix in joined]
    biases = [None] * len(joined) if bias is None else list(bias.split_with_sizes(lengths))
    linears = [matrix.linear(part_bias) for matrix, part_bias in zip(joined, biases, strict=True)]
    return linears[0] if len(linears) == 1 else StackedLinear(tuple(linears))


def joined_runs(parts: Sequence[Matrix]) -> list[Matrix]:
    """The matrices that `parts` become when neighbours of one kind are joined by rows."""
    runs = [list(run) for _, run in groupby(parts, lambda part: part.kind)]
    return [first.above(others) if others else first for first, *others in runs]


def summed_linear(matrix: Matrix, bias: Tensor | None, group: Group) -> Linear:
    """A linear of this rank's columns, `matrix` [out_dim, in_dim / ranks], and the whole `bias`."""
    if group.num_ranks == 1:
        return matrix.linear(bias)
    return SummedLinear(matrix.linear(bias if group.rank == 0 else None), group)
