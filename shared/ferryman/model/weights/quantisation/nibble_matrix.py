"""A matrix of codes of four bits with small scales, which a product keeps as they are stored.

    value[i, j] = table[code[i, j]] · scale[i, g] · factor[i]            g = j // group_len

NVFP4 has a scale of one byte (E4M3) for 16 columns and a factor for the tensor, bitsandbytes a
float32 for 64 columns. On a CPU with AVX-512 a product reads them so (`block_product`); elsewhere,
and where a cut divides a group, the scales become floats (`QuantisedMatrix`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from ferryman.model.weights.linear import Linear, is_processor
from ferryman.model.weights.matrix import Matrix
from ferryman.model.weights.named_weights import accumulation_dtype
from ferryman.model.weights.quantisation.codes import NibbleCodes, stack_rows, take_rows
from ferryman.model.weights.quantisation.gguf_matrix import BlockLinear
from ferryman.model.weights.quantisation.quantised_matrix import QuantisedMatrix, even_groups
from ferryman_kernels.cpu.huge_pages import weight_zeros
from ferryman_kernels.products.blocks.block_product import (
    E4M3,
    FLOATS,
    LANES,
    NO_CODES,
    BlockForm,
    BlockPanels,
    BlockParts,
    pack_blocks,
    panel_bytes,
)
from ferryman_kernels.products.packed_product import reads_panels

# A run of panels is decoded by so many inputs, so theirs must be a multiple.
_RUN_INPUTS = 32
# Numbers that are taken apart at once.
_NUMBERS_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class NibbleMatrix:
    """`scales` [rows, columns / group_len] in float8_e4m3fn or float32; `factors` [rows, 1] in the
    accumulation dtype of `dtype`, which is the model's, as `device` is."""

    codes: NibbleCodes
    scales: Tensor
    factors: Tensor
    group_len: int
    dtype: torch.dtype
    device: torch.device

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape

    @property
    def kind(self) -> Hashable:
        return NibbleMatrix, self.codes.kind, self.scales.dtype, self.group_len

    def narrow(self, axis: int, start: int, length: int) -> Matrix:
        """A part of whole groups stays in their scales."""
        if axis == 1 and (start % self.group_len or length % self.group_len):
            return self.by_groups().narrow(axis, start, length)
        codes = self.codes.narrow(axis, start, length)
        if axis == 1:
            first, count = start // self.group_len, length // self.group_len
            return replace(self, codes=codes, scales=self.scales.narrow(1, first, count))
        part = slice(start, start + length)
        return replace(self, codes=codes, scales=self.scales[part], factors=self.factors[part])

    def with_rows(self, rows: Tensor) -> NibbleMatrix:
        codes, scales = self.codes.with_rows(rows), take_rows(self.scales, rows)
        return replace(self, codes=codes, scales=scales, factors=self.factors[rows])

    def above(self, others: Sequence[Matrix]) -> NibbleMatrix:
        below = [other for other in others if isinstance(other, NibbleMatrix)]
        return replace(
            self,
            codes=self.codes.above([other.codes for other in below]),
            scales=stack_rows([self.scales, *(other.scales for other in below)]),
            factors=torch.cat([self.factors, *(other.factors for other in below)]),
        )

    def scaled(self, factor: Tensor) -> NibbleMatrix:
        return replace(self, factors=self.factors * factor.to(self.factors))

    def dequantised(self) -> Tensor:
        return self.by_groups().dequantised()

    def by_groups(self) -> QuantisedMatrix:
        """The same numbers, with scales in floats that have the factors in them."""
        wide = accumulation_dtype(self.dtype)
        scales = self.scales.to(wide) * self.factors.to(wide)
        groups = even_groups(self.shape[1], self.group_len)
        return QuantisedMatrix(self.codes, scales, groups, None, self.dtype, self.device)

    def linear(self, bias: Tensor | None) -> Linear:
        form = self._form()
        if form is None:
            return self.by_groups().linear(bias)
        added = torch.empty(0, dtype=self.dtype, device=self.device)
        return BlockLinear(self._panels(form), added if bias is None else bias.contiguous())

    def _form(self) -> BlockForm | None:
        """The form in which a loop reads this matrix, or None if there is no such loop."""
        is_read = is_processor(self.device) and reads_panels(self.dtype)
        if not is_read or self.shape[1] % _RUN_INPUTS:
            return None
        scales = E4M3 if self.scales.dtype is torch.float8_e4m3fn else FLOATS
        if self.group_len == 16:
            return BlockForm(4, 16, 1, False, NO_CODES, scales, table=self.codes.table)
        groups, odd = divmod(self.group_len, _RUN_INPUTS)
        if odd:
            return None
        return BlockForm(4, _RUN_INPUTS, groups, False, NO_CODES, scales, table=self.codes.table)

    def _panels(self, form: BlockForm) -> BlockPanels:
        """A copy in the order in which products read codes."""
        rows, columns = self.shape
        panels = -(-rows // LANES)
        size = panels, panel_bytes(form, columns)
        content = weight_zeros(size, torch.uint8, self.device)
        factors = F.pad(self.factors[:, 0].to(torch.float32), (0, panels * LANES - rows))
        if not self.codes.packed.is_meta:
            step = max(1, _NUMBERS_AT_ONCE // (LANES * columns))
            for first in range(0, panels, step):
                part = self.narrow(0, first * LANES, min(step * LANES, rows - first * LANES))
                assert isinstance(part, NibbleMatrix)
                content[first : first + step] = pack_blocks(part._parts(), form, self.dtype)
        table = torch.tensor(self.codes.table, dtype=torch.float32, device=self.device)
        return BlockPanels(content, factors, table, form, rows, columns, self.dtype)

    def _parts(self) -> BlockParts:
        bits = torch.int32 if self.scales.dtype is torch.float32 else torch.uint8
        scales = self.scales.contiguous().view(bits)
        return BlockParts(self.codes.unpacked().contiguous(), scales, None, None, None)
