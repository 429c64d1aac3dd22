"""Keys and values in pages of 8 bits: e4m3 codes, and a scale for each token and head.

    scale  = the least power of two with amax(row) / scale ≤ 448        (1 for a row of zeros)
    code   = row / scale in float32, to the nearest e4m3, ties to even  [head_dim]
    stored = code · scale                                               this is the state

A token's codes depend on that token alone, never on its page or its chunk. So a page holds the same
bytes in whatever steps it was filled, and every query, even one of the same step, reads what is
stored. The division and the product by a power of two are exact, and a stored value is exact in
every dtype from bfloat16 on.

A card's kernels of attention in bfloat16 read codes and scales as they are. Elsewhere reading opens
the pages of a table in the dtype of the queries, which is a copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ferryman_kernels.attention.pages import write_kv

CODE_DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number in e4m3."""


@dataclass(frozen=True, slots=True)
class CodedRows:
    """`codes` [tokens, heads, head_dim] in e4m3, `scales` [tokens, heads] in float32."""

    codes: Tensor
    scales: Tensor

    def values(self, dtype: torch.dtype) -> Tensor:
        """The stored values, exact."""
        return self.codes.to(dtype) * self.scales[..., None].to(dtype)


def coded(rows: Tensor) -> CodedRows:
    """`rows` [tokens, heads, head_dim] quantised. NaN and infinity become NaN."""
    wide = rows if rows.dtype == torch.float64 else rows.float()
    # e4m3 has no infinity: it would become its largest number.
    wide = wide.masked_fill(wide.isinf(), torch.nan)
    # frexp: amax / 448 = mantissa · 2^exponent with a mantissa in [0.5, 1).
    mantissa, exponent = torch.frexp(wide.abs().amax(-1) / LARGEST)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    exponent = torch.where(mantissa == 0, 0, exponent).clamp(-126, 127)
    scales = torch.ldexp(torch.ones_like(mantissa), exponent)
    # Beneath 2^-126 a scale would not be a normal float32: such rows round to zeros.
    codes = (wide / scales[..., None]).float().to(CODE_DTYPE)
    return CodedRows(codes, scales.float())


def write_coded_kv(
    key_pages: Tensor,
    value_pages: Tensor,
    key_scales: Tensor,
    value_scales: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    rows: Tensor,
    positions: Tensor,
) -> None:
    """As `write_kv`, of codes and scales: pages [slots, kv_heads, page_size, head_dim] in e4m3,
    scales [slots, kv_heads, page_size] in float32."""
    key, value = coded(keys), coded(values)
    where = (page_table, rows, positions)
    pages = (key_pages.view(torch.uint8), value_pages.view(torch.uint8))
    write_kv(*pages, key.codes.view(torch.uint8), value.codes.view(torch.uint8), *where)
    scales = (key_scales[..., None], value_scales[..., None])
    write_kv(*scales, key.scales[..., None], value.scales[..., None], *where)


def opened_pages(pages: Tensor, scales: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """The stored values of the pages at `slots` [opened], in their order: [opened, kv_heads,
    page_size, head_dim]."""
    codes = pages.view(torch.uint8).index_select(0, slots).view(CODE_DTYPE)
    return codes.to(dtype).mul_(scales.index_select(0, slots)[..., None].to(dtype))


def named_pages(page_table: Tensor) -> tuple[Tensor, Tensor]:
    """The slots [opened] to open for `page_table` [rows, pages], and the table of what is opened:
    -1 where `page_table` has it.

    On a CPU each slot is opened once, whatever rows share it and however short a row is beside the
    longest. On a card that would be a wait for the device: there a slot is opened for each entry.
    A negative entry opens the first slot.
    """
    named = page_table.clamp_min(0)
    if page_table.device.type == "cpu":
        slots, places = torch.unique(named, return_inverse=True)
    else:
        slots = named.flatten()
        places = torch.arange(named.numel(), device=named.device).view(named.shape)
    return slots, torch.where(page_table < 0, -1, places)
