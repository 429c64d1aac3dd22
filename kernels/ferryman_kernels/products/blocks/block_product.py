"""The product of any number of tokens with a weight in codes of 4, 5, 6 or 8 bits, on a CPU.

    weight[o, i] = code · scale + shift        scale = factor · d · s, shift = factor · m · t
    y[t, o] = bias[o] + Σ_i weight[o, i] · x[t, i]                               [tokens, out_dim]

16 or 32 inputs of an output are a group, one group or several a record: d (float16, FP8, float32,
or the upper half of a float32) and m (float16) are a record's, s and t (bytes) a group's where it
has them. A code of 4 bits is a place in a table, one of 5 or 6 bits is less an offset, one of 8
bits has a sign.

    weight      rounded once to float32, and in bfloat16 once more: the numbers that ggml has
    sums        as in `packed_product` of those numbers, with the same bits

So a token's bits do not depend on the other tokens, nor on their number, nor on threads.

A panel has 64 outputs. It is record after record: d [64], m [64], and for each of the record's
groups s [64], t [64] and the codes in the order of `_block_codes`, which is another one for float32
and for bfloat16. Outputs behind the last one have a scale of zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ferryman_kernels.cpu._lanes import LANES as LANES
from ferryman_kernels.cpu._tiles import has_tiles
from ferryman_kernels.products._tiled_product_compiled import repays_copies
from ferryman_kernels.products.blocks._block_product_compiled import (
    E4M3,
    FLOATS,
    HALVES,
    NO_CODES,
    POWERS,
    SIGNED,
    UNSIGNED,
    block_product_compiled,
    block_rows_compiled,
    decode_panels_compiled,
)
from ferryman_kernels.products.packed_product import (
    packed_product,
    panels_in,
    reads_panels,
    shape_of_panels,
)

__all__ = [
    "E4M3",
    "FLOATS",
    "HALVES",
    "NO_CODES",
    "POWERS",
    "SIGNED",
    "UNSIGNED",
    "BlockForm",
    "BlockPanels",
    "BlockParts",
    "block_product",
    "block_product_reference",
    "block_rows",
    "decoded_panels",
    "pack_blocks",
    "panel_bytes",
]

_TABLE_LEN = 16
_SCALE_BYTES = {HALVES: 2, POWERS: 2, E4M3: 1, FLOATS: 4}
_SHIFT_BYTES = 2
# Panels that stay in the second cache until many tokens have passed them.
_DECODED_BYTES = 1 << 21


@dataclass(frozen=True, slots=True)
class BlockForm:
    """Codes of `bits` in groups of `group_len` inputs, `groups` of them a record.

    `codes_of_scales` says how s (and t, which is never signed) is stored, `scales` how d is;
    `offset` is taken from each code; `table` [16] has the numbers of codes of 4 bits, and is empty
    for others.
    """

    bits: int
    group_len: int
    groups: int
    has_shift: bool
    codes_of_scales: int
    scales: int = HALVES
    offset: int = 0
    table: tuple[float, ...] = ()

    @property
    def numbers(self) -> tuple[int, ...]:
        """The form as the loops take it."""
        return (
            self.bits, self.group_len, self.groups, int(self.has_shift), self.codes_of_scales,
            self.scales, self.offset,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class BlockParts:
    """Rows of codes [rows, columns] uint8, and the bits of d, m [rows, records] as integers of
    their size, s, t [rows, groups] uint8; m, s, t are None where the form has none."""

    codes: Tensor
    scales: Tensor
    shifts: Tensor | None
    scale_codes: Tensor | None
    shift_codes: Tensor | None


@dataclass(frozen=True, slots=True)
class BlockPanels:
    """`content` [panels, bytes] uint8; `factors` [64 · panels] float32, of each output;
    `table` [16] float32. All are contiguous."""

    content: Tensor
    factors: Tensor
    table: Tensor
    form: BlockForm
    out_dim: int
    in_dim: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.content.nbytes + self.factors.nbytes + self.table.nbytes


def panel_bytes(form: BlockForm, in_dim: int) -> int:
    """The bytes of a panel of so many inputs, a multiple of those of a record."""
    record_len = form.group_len * form.groups
    assert in_dim % record_len == 0, (in_dim, record_len)
    coded = 0 if form.codes_of_scales == NO_CODES else LANES * (1 + form.has_shift)
    of_group = coded + LANES * form.group_len * form.bits // 8
    head = LANES * (_SCALE_BYTES[form.scales] + _SHIFT_BYTES * form.has_shift)
    of_record = head + form.groups * of_group
    return in_dim // record_len * of_record


def pack_blocks(parts: BlockParts, form: BlockForm, dtype: torch.dtype) -> Tensor:
    """The panels [panels, bytes] of rows, for products in `dtype`."""
    rows, columns = parts.codes.shape
    panels, records = -(-rows // LANES), columns // (form.group_len * form.groups)

    def by_lane(of_rows: Tensor) -> Tensor:
        """[panels, numbers, 64]"""
        whole = F.pad(of_rows, (0, 0, 0, panels * LANES - rows))
        return whole.view(panels, LANES, -1).transpose(1, 2)

    of_group = [
        by_lane(numbers).reshape(panels, records, form.groups, LANES)
        for numbers in (parts.scale_codes, parts.shift_codes)
        if numbers is not None
    ]
    codes = F.pad(parts.codes, (0, 0, 0, panels * LANES - rows))
    planes = _planes(codes.view(panels, LANES, -1, form.group_len), form.bits, dtype)
    of_group.append(planes.view(panels, records, form.groups, -1))
    of_record = [
        by_lane(numbers).contiguous().view(torch.uint8).view(panels, records, -1)
        for numbers in (parts.scales, parts.shifts)
        if numbers is not None
    ]
    of_record.append(torch.cat(of_group, dim=3).flatten(2))
    return torch.cat(of_record, dim=2).flatten(1)


def _planes(codes: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """The bytes of codes [panels, 64, groups, inputs] of each group: [panels, groups, bytes]."""
    panels, _, groups, inputs = codes.shape
    if dtype is torch.bfloat16:
        in_order = codes.view(panels, 8, 8, groups, inputs // 2, 2).permute(0, 3, 4, 1, 2, 5)
    else:
        in_order = codes.view(panels, 4, 16, groups, inputs // 2, 2).permute(0, 3, 4, 5, 1, 2)
    vectors = in_order.reshape(panels, groups, -1, 16)
    if bits == 8:
        return vectors.flatten(2)
    planes = [_words(vectors & 0xF, 2, 4)]
    if bits > 4:
        planes.append(_words(vectors >> 4, 8 // (bits - 4), bits - 4))
    return torch.cat(planes, dim=2)


def _words(vectors: Tensor, of_byte: int, bits: int) -> Tensor:
    """Words of so many `bits` of each vector, the first vector's in the lowest; `of_byte` vectors
    share a byte: vectors [panels, groups, vectors, 16] to bytes [panels, groups, bytes]."""
    panels, groups, _, width = vectors.shape
    together = vectors.reshape(panels, groups, -1, 4, of_byte, width)
    shared = together[..., 0, :].clone()
    for place in range(1, of_byte):
        shared |= together[..., place, :] << (bits * place)
    return shared.transpose(3, 4).reshape(panels, groups, -1)


def decoded_panels(weight: BlockPanels, first: int, end: int) -> Tensor:
    """The numbers of panels [first, end), as `shape_of_panels` says."""
    _, *rest = shape_of_panels(weight.out_dim, weight.in_dim, weight.dtype)
    decoded = torch.empty(end - first, *rest, dtype=weight.dtype)
    decode_panels_compiled(
        weight.form.numbers, weight.table, weight.content, weight.factors, first, decoded
    )
    return decoded


def block_rows(weight: BlockPanels, rows: Tensor) -> Tensor:
    """The numbers of the outputs `rows` [n] int64: [n, in_dim]; not-a-number where there is no such
    output."""
    assert rows.dtype is torch.int64, rows.dtype
    numbers = torch.empty(len(rows), weight.in_dim, dtype=weight.dtype)
    _, steps, *_ = shape_of_panels(weight.out_dim, weight.in_dim, weight.dtype)
    block_rows_compiled(
        weight.form.numbers, weight.table, weight.content, weight.factors, weight.out_dim, steps,
        rows, numbers,
    )  # fmt: skip
    return numbers


def block_product_reference(x: Tensor, numbers: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x.double(), numbers.double(), bias.double()).to(x.dtype)


def block_product(x: Tensor, weight: BlockPanels, bias: Tensor) -> Tensor:
    """The product of x [tokens, in_dim]; `bias` is [out_dim], or [0] for none; all of one dtype
    that `reads_panels`."""
    assert reads_panels(x.dtype), "the processor has no such vectors"
    assert x.dtype is weight.dtype is bias.dtype, (x.dtype, weight.dtype, bias.dtype)
    assert x.shape[1] == weight.in_dim, (x.shape, weight.in_dim)
    assert bias.numel() in (0, weight.out_dim), (bias.shape, weight.out_dim)
    assert bias.is_contiguous(), bias.stride()
    by_tiles = x.dtype is torch.bfloat16 and has_tiles()
    if by_tiles and repays_copies(len(x), weight.out_dim):
        return _many(x, weight, bias)
    return block_product_compiled(
        x, weight.form.numbers, weight.table, weight.content, weight.factors, bias, weight.out_dim
    )


def _many(x: Tensor, weight: BlockPanels, bias: Tensor) -> Tensor:
    """The same by decoded panels that pass all tokens together, which have copies then."""
    y, panels = x.new_empty(len(x), weight.out_dim), len(weight.content)
    of_panel = x.itemsize * LANES * weight.in_dim
    tile = max(4, _DECODED_BYTES // of_panel)
    for first in range(0, panels, tile):
        end = min(first + tile, panels)
        outputs = slice(first * LANES, min(end * LANES, weight.out_dim))
        numbers = decoded_panels(weight, first, end)
        decoded = panels_in(numbers, outputs.stop - outputs.start, weight.in_dim)
        y[:, outputs] = packed_product(x, decoded, bias[outputs])
    return y
