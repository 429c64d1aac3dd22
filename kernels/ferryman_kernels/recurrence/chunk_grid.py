"""The absolute grid on which recurrences are scanned: blocks of `chunk_len` positions.

Blocks are counted from position 0 of each request, and a block that a span cuts is padded in place.
So the place of a token in its block never depends on the start of its request's span. Therefore the
states at the end of a block are equal for different requests, and for a request that resumed.
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

    `cells` [tokens] is the place of each token in [blocks · chunk_len].
    """

    chunk_len: int
    spans: tuple[Span, ...]
    first_blocks: tuple[int, ...]
    cells: Tensor

    @property
    def num_blocks(self) -> int:
        return self.first_blocks[-1]

    def block_of(self, request_index: int, position: int) -> int:
        """The block with the state at `position` at its end."""
        first = self.spans[request_index][0] // self.chunk_len
        return self.first_blocks[request_index] + (position - 1) // self.chunk_len - first

    def wanted(self, slots: Tensor, snapshots: Sequence[SlotAt]) -> dict[int, list[int]]:
        """For each block, the slots that get the state after it: snapshots first, then `slots`."""
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
    """[tokens, …] placed in their cells, zeros elsewhere: [blocks, chunk, …]."""
    cells = rows.new_zeros(grid.num_blocks * grid.chunk_len, *rows.shape[1:])
    cells[grid.cells.to(rows.device)] = rows
    return cells.view(grid.num_blocks, grid.chunk_len, *rows.shape[1:])


def decay_between(log_decay: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(L[t] - L[s]) for s ≤ t, and 0 for s > t, of `log_decay` L [..., chunk] in float64.

    Each L is split into two narrow numbers that sum to it, so differences stay as exact.
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
    """Asserts that no span is empty, that spans cover `tokens`, and that each snapshot is at the
    end of a block or of its span."""
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
