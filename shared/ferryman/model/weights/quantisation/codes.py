"""The codes of a quantised matrix: one a byte, or two.

byte      int8, or FP8 with 4 bits of exponent and 3 of mantissa (E4M3)
nibble    an index into 16 values; the even column is in the lower four bits of its byte

GPTQ and others store integers of 4 or 8 bits in words of 32, the lowest bits first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

INT4 = tuple(float(code) for code in range(-8, 8))
"""Four bits as an offset from -8."""

_FP4_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4 = (*_FP4_SIZES, *(-size for size in _FP4_SIZES))
"""One bit of sign, two of exponent, one of mantissa (E2M1)."""


class Codes(Protocol):
    """Codes [rows, columns], and the numbers they stand for before any scale."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def kind(self) -> Hashable:
        """Codes of one kind have the same meaning."""
        ...

    @property
    def nbytes(self) -> int: ...

    def narrow(self, axis: int, start: int, length: int) -> Codes: ...

    def with_rows(self, rows: Tensor) -> Codes: ...

    def above(self, others: Sequence[Codes]) -> Codes: ...

    def copied(self, device: torch.device) -> Codes:
        """The same codes in memory of their own, row after row, on `device`."""
        ...

    def arranged(self, arrange: Callable[[Tensor], Tensor]) -> Codes:
        """The codes in the rows and columns that `arrange` gives them, as bytes [rows, columns]."""
        ...

    def values(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        """The numbers in rows [start, end), as a new [end - start, columns] in `dtype`."""
        ...


@dataclass(frozen=True, slots=True)
class ByteCodes:
    """`tensor` [rows, columns] in int8 or float8_e4m3fn, without not-a-number."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.tensor.shape
        return rows, columns

    @property
    def kind(self) -> Hashable:
        return self.tensor.dtype

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def narrow(self, axis: int, start: int, length: int) -> ByteCodes:
        return replace(self, tensor=self.tensor.narrow(axis, start, length))

    def with_rows(self, rows: Tensor) -> ByteCodes:
        return replace(self, tensor=take_rows(self.tensor, rows))

    def above(self, others: Sequence[Codes]) -> ByteCodes:
        below = [codes.tensor for codes in others if isinstance(codes, ByteCodes)]
        return replace(self, tensor=stack_rows([self.tensor, *below]))

    def copied(self, device: torch.device) -> ByteCodes:
        return replace(self, tensor=copied(self.tensor, device))

    def arranged(self, arrange: Callable[[Tensor], Tensor]) -> ByteCodes:
        return replace(self, tensor=arrange(self.tensor.view(torch.uint8)).view(self.tensor.dtype))

    def values(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        rows = self.tensor[start:end]
        if rows.dtype is torch.float8_e4m3fn:
            return _from_e4m3(rows).to(dtype)
        return torch.empty(rows.shape, dtype=dtype, device=rows.device).copy_(rows)


def _from_e4m3(rows: Tensor) -> Tensor:
    """float32, by moving sign, exponent and mantissa to their places and the exponent's bias by a
    product. On a CPU torch's own conversion takes five times as long (2.13; AVX-512)."""
    bits = rows.view(torch.int8).to(torch.int32).bitwise_left_shift_(20)
    return bits.bitwise_and_(_SIGN_AND_E4M3).view(torch.float32).mul_(2.0**120)


_SIGN_AND_E4M3 = -0x7810_0000  # bits 31 and 26 to 20


@dataclass(frozen=True, slots=True)
class NibbleCodes:
    """`packed` [rows, columns / 2] uint8, rounded up; `table` has the value of each code."""

    packed: Tensor
    columns: int
    table: tuple[float, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], self.columns

    @property
    def kind(self) -> Hashable:
        return self.table

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    def narrow(self, axis: int, start: int, length: int) -> NibbleCodes:
        if axis == 0:
            return replace(self, packed=self.packed[start : start + length])
        if start % 2:
            return pack_nibbles(self.unpacked()[:, start : start + length], self.table)
        last = (start + length + 1) // 2
        return replace(self, packed=self.packed[:, start // 2 : last], columns=length)

    def with_rows(self, rows: Tensor) -> NibbleCodes:
        return replace(self, packed=self.packed[rows])

    def above(self, others: Sequence[Codes]) -> NibbleCodes:
        packed = [codes.packed for codes in others if isinstance(codes, NibbleCodes)]
        return replace(self, packed=torch.cat([self.packed, *packed]))

    def copied(self, device: torch.device) -> NibbleCodes:
        return replace(self, packed=copied(self.packed, device))

    def arranged(self, arrange: Callable[[Tensor], Tensor]) -> NibbleCodes:
        return pack_nibbles(arrange(self.unpacked()), self.table)

    def unpacked(self) -> Tensor:
        """[rows, columns] uint8: the codes, one a byte."""
        pairs = torch.stack((self.packed & 0x0F, self.packed >> 4), dim=-1)
        return pairs.flatten(-2)[:, : self.columns]

    def values(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        # One look-up for a byte gives both of its numbers.
        table = torch.tensor(self.table, dtype=dtype, device=self.packed.device)
        pairs = torch.stack((table.repeat(16), table.repeat_interleave(16)), dim=-1)
        numbers = F.embedding(self.packed[start:end].to(torch.int32), pairs).flatten(-2)
        return numbers if self.columns % 2 == 0 else numbers[:, : self.columns].contiguous()


def pack_nibbles(codes: Tensor, table: tuple[float, ...]) -> NibbleCodes:
    """Packs codes [rows, columns] of 0 to 15, one an element of any integer dtype."""
    columns = codes.shape[1]
    even = F.pad(codes.to(torch.uint8), (0, columns % 2))
    return NibbleCodes(even[:, ::2] | even[:, 1::2] << 4, columns, table)


def copied(tensor: Tensor, device: torch.device) -> Tensor:
    """The same numbers in memory of their own, row after row, on `device`."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device).copy_(tensor)


def take_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """tensor[rows], for float8 as well, which torch does not index everywhere."""
    if tensor.dtype.itemsize > 1:
        return tensor[rows]
    return tensor.view(torch.uint8)[rows].view(tensor.dtype)


def stack_rows(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors' rows, one tensor below the other, for float8 as well."""
    if tensors[0].dtype.itemsize > 1:
        return torch.cat(list(tensors))
    joined = torch.cat([tensor.view(torch.uint8) for tensor in tensors])
    return joined.view(tensors[0].dtype)


PACKED_BITS = (4, 8)
_WORD_BITS = 32


def num_words(count: int, bits: int) -> int:
    """The number of words that hold `count` integers."""
    return -(-count * bits // _WORD_BITS)


def unpacked_words(packed: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` integers along the last axis, from 0, as int16."""
    shifts = torch.arange(0, _WORD_BITS, bits, dtype=torch.int32, device=packed.device)
    integers = (packed[..., None] >> shifts) & ((1 << bits) - 1)
    return integers.flatten(-2)[..., :count].to(torch.int16)


def middle(bits: int) -> int:
    """The integer that stands for zero if there are no zero points."""
    return 1 << (bits - 1)


def signed_codes(unsigned: Tensor, bits: int) -> Codes:
    """Codes [rows, columns] that stand for unsigned - middle(bits)."""
    if bits == 4:
        return pack_nibbles(unsigned, INT4)
    return ByteCodes((unsigned - middle(bits)).to(torch.int8))


def zeros_or_none(zeros: Tensor) -> Tensor | None:
    """Zero points, or None if all are 0, as when a tool quantised symmetrically."""
    return zeros if zeros.is_meta or bool(zeros.any()) else None
