"""A matrix in ggml's blocks, which a product keeps in its codes (`block_product`).

Each row is a row of blocks of 32 or 256 columns. In memory a weight has the codes of its file and
its scales; the least scales of K types, 6 bits in the file, are bytes:

    type        Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q6_K, IQ4_NL    Q4_K    Q5_K    IQ4_XS    MXFP4
    memory                         1.00                       1.03    1.02     1.01      1.06

and four bytes a row, of as many rows as fill panels of 64.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ferryman.errors import ConfigError
from ferryman.gguf.block_codes import BLOCK_READERS
from ferryman.gguf.dequantisation import dequantised
from ferryman.gguf.dequantisation.short_blocks import TWICE_E2M1, UNEVEN
from ferryman.gguf.tensor_types import TYPE_NAMES, TensorType
from ferryman.model.weights.linear import Linear, is_processor
from ferryman.model.weights.matrix import Matrix
from ferryman.model.weights.quantisation.codes import copied
from ferryman_kernels.cpu.huge_pages import weight_zeros
from ferryman_kernels.products.blocks.block_product import (
    LANES,
    NO_CODES,
    POWERS,
    SIGNED,
    UNSIGNED,
    BlockForm,
    BlockPanels,
    BlockParts,
    block_product,
    pack_blocks,
    panel_bytes,
)
from ferryman_kernels.products.packed_product import reads_panels

_FROM_MINUS_8 = tuple(float(code) for code in range(-8, 8))
_FROM_0 = tuple(float(code) for code in range(16))
_UNEVEN, _E2M1 = tuple(UNEVEN.tolist()), tuple(TWICE_E2M1.tolist())

FORMS: Mapping[str, BlockForm] = {
    "Q4_0": BlockForm(4, 32, 1, False, NO_CODES, table=_FROM_MINUS_8),
    "Q4_1": BlockForm(4, 32, 1, True, NO_CODES, table=_FROM_0),
    "Q5_0": BlockForm(5, 32, 1, False, NO_CODES, offset=16),
    "Q5_1": BlockForm(5, 32, 1, True, NO_CODES),
    "Q8_0": BlockForm(8, 32, 1, False, NO_CODES),
    "Q4_K": BlockForm(4, 32, 8, True, UNSIGNED, table=_FROM_0),
    "Q5_K": BlockForm(5, 32, 8, True, UNSIGNED),
    "Q6_K": BlockForm(6, 16, 16, False, SIGNED, offset=32),
    "IQ4_NL": BlockForm(4, 32, 1, False, NO_CODES, table=_UNEVEN),
    "IQ4_XS": BlockForm(4, 32, 8, False, SIGNED, table=_UNEVEN),
    "MXFP4": BlockForm(4, 32, 1, False, NO_CODES, scales=POWERS, table=_E2M1),
}
"""The form of a type's panels. Other types are read in floats."""

# Numbers that are taken apart at once.
_NUMBERS_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class GgufMatrix:
    """`blocks` [rows, blocks, block_bytes] uint8, maybe a view of a file; `factors` [rows, 1]
    float32 multiply each row, or None; `dtype` and `device` are the model's."""

    type: TensorType
    blocks: Tensor
    factors: Tensor | None
    dtype: torch.dtype
    device: torch.device

    @property
    def shape(self) -> tuple[int, int]:
        rows, blocks, _ = self.blocks.shape
        return rows, blocks * self.type.block_len

    @property
    def kind(self) -> Hashable:
        return self.type

    def narrow(self, axis: int, start: int, length: int) -> GgufMatrix:
        """Raises ConfigError for columns that begin or end inside a block."""
        if axis == 1:
            size = self.type.block_len
            if start % size or length % size:
                raise ConfigError(
                    f"columns {start} to {start + length} of a weight in {self.type.name} cut its "
                    f"blocks of {size}; use fewer ranks, or a file in Q8_0 or Q4_0"
                )
            return replace(self, blocks=self.blocks.narrow(1, start // size, length // size))
        factors = None if self.factors is None else self.factors[start : start + length]
        return replace(self, blocks=self.blocks.narrow(0, start, length), factors=factors)

    def with_rows(self, rows: Tensor) -> GgufMatrix:
        factors = None if self.factors is None else self.factors[rows]
        return replace(self, blocks=self.blocks[rows], factors=factors)

    def with_blocks(self, blocks: Tensor) -> GgufMatrix:
        """The matrix with its columns in another order, by whole blocks."""
        return replace(self, blocks=self.blocks[:, blocks])

    def above(self, others: Sequence[Matrix]) -> GgufMatrix:
        every = [self, *(other for other in others if isinstance(other, GgufMatrix))]
        factors = None
        if any(matrix.factors is not None for matrix in every):
            factors = torch.cat([matrix._every_factor() for matrix in every])
        return replace(self, blocks=torch.cat([m.blocks for m in every]), factors=factors)

    def scaled(self, factor: Tensor) -> GgufMatrix:
        ours = self._every_factor()
        return replace(self, factors=ours * factor.to(ours))

    def dequantised(self) -> Tensor:
        return self.dequantised_rows(0, self.shape[0])

    def dequantised_rows(self, start: int, end: int) -> Tensor:
        """Rows [start, end) in the model's dtype: ggml's numbers in float32, rounded once."""
        blocks = self.blocks[start:end]
        shape = (len(blocks), self.shape[1])
        if blocks.is_meta:
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        content = blocks.cpu().contiguous().view(-1).numpy()
        numbers = torch.from_numpy(dequantised(self.type, content)).view(shape)
        if self.factors is not None:
            numbers = numbers.double() * self.factors[start:end].double()
        return numbers.to(device=self.device, dtype=self.dtype)

    def linear(self, bias: Tensor | None) -> Linear:
        if is_processor(self.device) and reads_panels(self.dtype):
            added = torch.empty(0, dtype=self.dtype, device=self.device)
            added = added if bias is None else bias.contiguous()
            return BlockLinear(self.panels(), added)
        blocks = copied(self.blocks, self.blocks.device)
        return DequantisedLinear(replace(self, blocks=blocks), bias)

    def panels(self) -> BlockPanels:
        """A copy in the order in which products read codes."""
        (rows, columns), form = self.shape, FORMS[self.type.name]
        panels = -(-rows // LANES)
        size = panels, panel_bytes(form, columns)
        content = weight_zeros(size, torch.uint8, self.device)
        factors = F.pad(self._every_factor()[:, 0], (0, panels * LANES - rows))
        if not self.blocks.is_meta:
            step = max(1, _NUMBERS_AT_ONCE // (LANES * columns))
            for first in range(0, panels, step):
                part = self.blocks[first * LANES : (first + step) * LANES]
                packed = pack_blocks(block_parts(self.type, part), form, self.dtype)
                content[first : first + step] = packed
        table = torch.tensor(form.table or _FROM_0, device=self.device)
        return BlockPanels(content, factors, table, form, rows, columns, self.dtype)

    def _every_factor(self) -> Tensor:
        if self.factors is not None:
            return self.factors
        return torch.ones(self.shape[0], 1, device=self.blocks.device)


@dataclass(frozen=True, slots=True)
class BlockLinear:
    """A product that keeps its weight in codes; `bias` [out_dim], or [0] if there is none.

    A token's bits depend on the token and the weight alone.
    """

    panels: BlockPanels
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return block_product(x, self.panels, self.bias)


@dataclass(frozen=True, slots=True)
class DequantisedLinear:
    """A product that dequantises some rows at a time, where no loop reads panels."""

    matrix: GgufMatrix
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        rows, columns = self.matrix.shape
        step = max(1, _NUMBERS_AT_ONCE // columns)
        y = x.new_empty(len(x), rows)
        for start in range(0, rows, step):
            end = min(start + step, rows)
            bias = None if self.bias is None else self.bias[start:end]
            y[:, start:end] = F.linear(x, self.matrix.dequantised_rows(start, end), bias)
        return y


def gguf_matrix(
    kind: str,
    content: Tensor | memoryview,
    outputs: int,
    inputs: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> GgufMatrix:
    """The matrix [outputs, inputs] of blocks of the type `kind`, row after row as a file has them.

    Raises ConfigError for a type that is not kept in codes, for inputs that are no whole blocks,
    and for content of another size.
    """
    if kind not in FORMS:
        raise ConfigError(f"weights in {kind} are not kept in codes; known are {', '.join(FORMS)}")
    block_type = TYPE_NAMES[kind]
    if inputs % block_type.block_len:
        raise ConfigError(
            f"{inputs} inputs are no whole blocks of {kind}, which has {block_type.block_len} each"
        )
    blocks = inputs // block_type.block_len
    if isinstance(content, memoryview):
        content = torch.frombuffer(content, dtype=torch.uint8)
    flat = content.reshape(-1)
    expected = outputs * blocks * block_type.block_bytes
    if flat.dtype is not torch.uint8 or flat.numel() != expected:
        raise ConfigError(
            f"a weight [{outputs}, {inputs}] in {kind} has {expected} bytes, not "
            f"{flat.numel()} of {flat.dtype}"
        )
    shaped = flat.view(outputs, blocks, block_type.block_bytes)
    return GgufMatrix(block_type, shaped, None, dtype, device)


def block_parts(kind: TensorType, blocks: Tensor) -> BlockParts:
    """The codes and scales of rows of blocks [rows, blocks, block_bytes]."""
    rows = len(blocks)
    content = np.ascontiguousarray(blocks.numpy()).reshape(-1, kind.block_bytes)
    read = BLOCK_READERS[kind.name](content)

    def by_row(part: NDArray[np.uint8] | NDArray[np.int16]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(part)).view(rows, -1)

    shifts = None if read.leasts is None else read.leasts.view(np.int16)
    return BlockParts(
        by_row(read.codes),
        by_row(read.scales.view(np.int16)),
        None if shifts is None else by_row(shifts),
        None if read.scale_codes is None else by_row(read.scale_codes),
        None if read.least_codes is None else by_row(read.least_codes),
    )
