"""A matrix of codes with a scale for each row and group of columns.

    value[i, j] = (code[i, j] - zero[i, g]) · scale[i, g]          g = group of column j

Every format is this: one scale for a tensor or for a row is one group, blocks repeat their scale in
each of their rows, and columns that were quantised by activation order have groups in no order. So
a matrix can be cut and reordered anywhere, and no format needs an exception.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from ferryman.model.weights.linear import Linear, is_processor
from ferryman.model.weights.matrix import Matrix
from ferryman.model.weights.named_weights import accumulation_dtype
from ferryman.model.weights.quantisation.coded_panels import CodedPanelLinear, code_panels
from ferryman.model.weights.quantisation.codes import (
    INT4,
    ByteCodes,
    Codes,
    NibbleCodes,
    copied,
    stack_rows,
    take_rows,
)
from ferryman.model.weights.quantisation.products import (
    INT4_GROUPS,
    INT4_ROWS,
    INT8_COLUMNS,
    INT8_DTYPES,
    int4_linear,
    int8_linear,
)
from ferryman_kernels.products.packed_product import reads_panels

# A tile of dequantised rows that stays in the cache of a core.
_TILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """`scales` [rows, groups]; `groups` [columns] int64, each column's; `zeros` [rows, groups] in
    any integer dtype, or None if all are 0; `dtype` and `device` are the model's."""

    codes: Codes
    scales: Tensor
    groups: Tensor
    zeros: Tensor | None
    dtype: torch.dtype
    device: torch.device

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape

    @property
    def kind(self) -> Hashable:
        groups = self.groups.cpu().numpy().tobytes()
        return self.codes.kind, self.scales.dtype, groups, self.zeros is None

    @property
    def nbytes(self) -> int:
        """The bytes of codes, scales and zeros."""
        zeros = 0 if self.zeros is None else self.zeros.nbytes
        return self.codes.nbytes + self.scales.nbytes + zeros

    def narrow(self, axis: int, start: int, length: int) -> QuantisedMatrix:
        codes = self.codes.narrow(axis, start, length)
        if axis == 0:
            return self._with(codes, lambda tensor: tensor[start : start + length], self.groups)
        # A rank keeps the scales of its own columns alone.
        used, groups = torch.unique(self.groups[start : start + length], return_inverse=True)
        return self._with(codes, lambda tensor: take_rows(tensor.T, used).T, groups)

    def with_rows(self, rows: Tensor) -> QuantisedMatrix:
        codes = self.codes.with_rows(rows)
        return self._with(codes, lambda tensor: take_rows(tensor, rows), self.groups)

    def above(self, others: Sequence[Matrix]) -> QuantisedMatrix:
        below = [other for other in others if isinstance(other, QuantisedMatrix)]
        zeros = [matrix.zeros for matrix in (self, *below) if matrix.zeros is not None]
        return replace(
            self,
            codes=self.codes.above([other.codes for other in below]),
            scales=stack_rows([self.scales, *(other.scales for other in below)]),
            zeros=stack_rows(zeros) if zeros else None,
        )

    def scaled(self, factor: Tensor) -> QuantisedMatrix:
        wide = self.scales.to(accumulation_dtype(self.dtype))
        return replace(self, scales=wide * factor.to(wide))

    def dequantised(self) -> Tensor:
        return self.dequantised_rows(0, self.shape[0], group_length(self.groups))

    def dequantised_rows(self, start: int, end: int, even: int) -> Tensor:
        """Rows [start, end) in the model's dtype; `even` is `group_length` of the groups."""
        wide = accumulation_dtype(self.dtype)
        values, scales = self.codes.values(start, end, wide), self.scales[start:end].to(wide)
        zeros = None if self.zeros is None else self.zeros[start:end].to(wide)
        if even:
            # A view by groups is multiplied twenty times as fast as scales are gathered.
            by_group = values.view(end - start, -1, even)
            if zeros is not None:
                by_group.sub_(zeros[:, :, None])
            return by_group.mul_(scales[:, :, None]).flatten(1).to(self.dtype)
        if zeros is not None:
            values = values - zeros[:, self.groups]
        return (values * scales[:, self.groups]).to(self.dtype)

    def linear(self, bias: Tensor | None) -> Linear:
        (rows, columns), even = self.shape, group_length(self.groups)
        if is_processor(self.device):
            match self.codes:
                case ByteCodes(codes) if (
                    codes.dtype is torch.int8
                    and self.dtype in INT8_DTYPES
                    and even == columns
                    and self.zeros is None
                    and columns % INT8_COLUMNS == 0
                ):
                    scales = self.scales[:, 0].to(self.dtype)
                    return int8_linear(codes, scales, bias, self.device)
                case NibbleCodes(table=table) as codes if (
                    self.dtype is torch.bfloat16
                    and table == INT4
                    and even in INT4_GROUPS
                    and rows % INT4_ROWS == 0
                ):
                    return int4_linear(codes.unpacked(), self.scales, self.zeros, even, bias)
            if reads_panels(self.dtype):
                added = torch.empty(0, dtype=self.dtype, device=self.device)
                added = added if bias is None else bias.contiguous()
                return CodedPanelLinear(code_panels(self, even), rows, columns, added)
        return TiledLinear(self._copied(), even, bias)

    def _copied(self) -> QuantisedMatrix:
        """The same matrix in memory of its own, of which it may have been a small part."""

        def copy(tensor: Tensor) -> Tensor:
            return copied(tensor, self.device)

        return self._with(self.codes.copied(self.device), copy, self.groups.to(self.device))

    def _with(
        self, codes: Codes, part: Callable[[Tensor], Tensor], groups: Tensor
    ) -> QuantisedMatrix:
        """The matrix of other codes, with `part` of scales and zeros."""
        zeros = None if self.zeros is None else part(self.zeros)
        return replace(self, codes=codes, scales=part(self.scales), groups=groups, zeros=zeros)


@dataclass(frozen=True, slots=True)
class TiledLinear:
    """A product that dequantises so many rows at a time as stay in the cache; on any device.

    `even` is `group_length` of the matrix's groups; `product` is of inputs, weight and bias.
    """

    matrix: QuantisedMatrix
    even: int
    bias: Tensor | None
    product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear

    def __call__(self, x: Tensor) -> Tensor:
        rows, columns = self.matrix.shape
        tile = max(1, _TILE_BYTES // (columns * x.itemsize))
        y = x.new_empty(len(x), rows)
        for start in range(0, rows, tile):
            end = min(start + tile, rows)
            weight = self.matrix.dequantised_rows(start, end, self.even)
            bias = None if self.bias is None else self.bias[start:end]
            y[:, start:end] = self.product(x, weight, bias)
        return y


def group_length(groups: Tensor) -> int:
    """The length of groups that are alike and follow one another, or else 0."""
    columns = len(groups)
    length, odd = divmod(columns, int(groups.max()) + 1)
    if odd:
        return 0
    in_order = torch.arange(columns, device=groups.device) // length
    return length if torch.equal(groups, in_order) else 0


def even_groups(columns: int, length: int) -> Tensor:
    """The group of each column when so many follow one another; the last may be shorter."""
    return torch.arange(columns) // length
