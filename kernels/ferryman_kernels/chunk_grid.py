"""The absolute grid on which recurrences are scanned: blocks of `chunk_len` positions.

Blocks are counted from position 0 of each request, and one that a span cuts is padded in place. So
where a token stands in its block never depends on where its request's span starts, and the states
behind a block of different requests, or of one request resumed, coincide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ferryman_kernels.ragged import SlotAt, Span, first_tokens


@dataclass(frozen=True, slots=True)
class Grid:
    """A ragged batch cut into blocks; request i owns blocks [first_blocks[i], first_blocks[i+1]).

    `cells` [tokens] says where in [blocks · chunk_len] each token lies.
    """

    chunk_len: int
    spans: tuple[Span, ...]
    first_blocks: tuple[int, ...]
    cells: Tensor

    @property
    def num_blocks(self) -> int:
        return self.first_blocks[-1]

    def block_of(self, request_index: int, position: int) -> int:
        """The block whose end state is the state at `position`."""
        first = self.spans[request_index][0] // self.chunk_len
        return self.first_blocks[request_index] + (position - 1) // self.chunk_len - first

    def wanted(self, slots: Tensor, snapshots: Sequence[SlotAt]) -> dict[int, list[int]]:
        """For each block the slots that get the state behind it: snapshots, and `slots` at last."""
        ends = [
            (i, end, slot)
            for i, ((_, end), slot) in enumerate(zip(self.spans, slots.tolist(), strict=True))
        ]
        found: dict[int, list[int]] = {}
        for index, position, slot in (*snapshots, *ends):
            found.setdefault(self.block_of(index, position), []).append(slot)
        return found


def lay_grid(spans: Sequence[Span], chunk_len: int) -> Grid:
    """Cuts every span at the multiples of `chunk_len`."""
    firsts, cells = [0], []
    for start, end in spans:
        lead = firsts[-1] * chunk_len + start % chunk_len
        cells.append(torch.arange(lead, lead + end - start))
        firsts.append(firsts[-1] + -(-end // chunk_len) - start // chunk_len)
    return Grid(chunk_len, tuple(spans), tuple(firsts), torch.cat(cells))


def in_blocks(rows: Tensor, grid: Grid) -> Tensor:
    """[tokens, …] laid into its cells, zeros elsewhere: [blocks, chunk, …]."""
    cells = rows.new_zeros(grid.num_blocks * grid.chunk_len, *rows.shape[1:])
    cells[grid.cells.to(rows.device)] = rows
    return cells.view(grid.num_blocks, grid.chunk_len, *rows.shape[1:])


def decay_between(log_decay: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(L[t] - L[s]) for s ≤ t, and 0 ahead, of `log_decay` L [..., chunk] in float64.

    Each L goes into two narrow numbers that sum to it: differences of them stay as exact.
    """
    upper = log_decay.to(dtype)
    lower = (log_decay - upper).to(dtype)
    between = upper[..., :, None] - upper[..., None, :]
    between += lower[..., :, None] - lower[..., None, :]
    ahead = torch.ones(between.shape[-2:], dtype=torch.bool, device=between.device).triu(1)
    return between.masked_fill_(ahead, -torch.inf).exp_()


def check_spans(
    spans: Sequence[Span], snapshots: Sequence[SlotAt], tokens: int, chunk_len: int
) -> None:
    """Spans are not empty and cover `tokens`; a snapshot stands at a block's end or its span's."""
    assert all(end > start >= 0 for start, end in spans), spans
    assert sum(end - start for start, end in spans) == tokens, (spans, tokens)
    for index, position, _ in snapshots:
        start, end = spans[index]
        assert start < position <= end, (spans, snapshots)
        assert position % chunk_len == 0 or position == end, (position, chunk_len)


Rows = tuple[tuple[int, ...], ...]


def describe_blocks(
    spans: Sequence[Span], snapshots: Sequence[SlotAt], chunk_len: int
) -> tuple[tuple[int, ...], Rows, tuple[int, ...]]:
    """Each request's first block; each block's (first token, low, high); each block's snapshot."""
    tokens = first_tokens(spans)
    firsts, blocks = [0], list[tuple[int, ...]]()
    for (start, end), token in zip(spans, tokens, strict=False):
        for first in range(start - start % chunk_len, end, chunk_len):
            low, high = max(start - first, 0), min(end - first, chunk_len)
            blocks.append((token + first - start, low, high))
        firsts.append(len(blocks))
    wanted = [-1] * len(blocks)
    for index, position, slot in snapshots:
        block = firsts[index] + (position - 1) // chunk_len - spans[index][0] // chunk_len
        assert wanted[block] < 0, f"two snapshots of request {index} at {position}"
        wanted[block] = slot
    return tuple(firsts), tuple(blocks), tuple(wanted)
