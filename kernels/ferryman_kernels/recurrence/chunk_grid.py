"""The absolute grid on which recurrences are scanned: blocks of `chunk_len` positions.

Blocks are counted from position 0 of each request, and cut where a span or a snapshot does; a block
that is cut is padded in place. So the place of a token in its block never depends on the start of
its request's span. Therefore the states at the end of a whole block are equal for different
requests, and for a request that resumed at such an end. A cut within a block changes the order of
its sums, so the last bits after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ferryman_kernels.ragged import SlotAt, Span, first_tokens

Block = tuple[int, int, int]
"""The position of its first column, which a cut may leave to an earlier block, and the columns
[low, high) that are its own."""


def cut_blocks(
    spans: Sequence[Span], snapshots: Sequence[SlotAt], chunk_len: int
) -> tuple[tuple[Block, ...], ...]:
    """The blocks of each request, in the order of its positions."""
    cuts = [{start, end, *_multiples(start, end, chunk_len)} for start, end in spans]
    for index, position, _ in snapshots:
        cuts[index].add(position)
    return tuple(
        tuple(_block(low, high, chunk_len) for low, high in pairwise(sorted(positions)))
        for positions in cuts
    )


def _multiples(start: int, end: int, chunk_len: int) -> range:
    """The multiples of `chunk_len` from `start` on, below `end`."""
    return range(start + -start % chunk_len, end, chunk_len)


def _block(low: int, high: int, chunk_len: int) -> Block:
    first = low - low % chunk_len
    return first, low - first, high - first


@dataclass(frozen=True, slots=True)
class Grid:
    """A ragged batch cut into blocks; request i owns blocks [first_blocks[i], first_blocks[i+1]).

    `block_ending` has the block of a request that ends at a position. `cells` [tokens] is the place
    of each token in [blocks · chunk_len].
    """

    chunk_len: int
    spans: tuple[Span, ...]
    first_blocks: tuple[int, ...]
    block_ending: Mapping[tuple[int, int], int]
    cells: Tensor

    @property
    def num_blocks(self) -> int:
        return self.first_blocks[-1]

    def wanted(self, slots: Tensor, snapshots: Sequence[SlotAt]) -> dict[int, list[int]]:
        """For each block, the slots that get the state after it: snapshots first, then `slots`."""
        ends = [
            (i, end, slot)
            for i, ((_, end), slot) in enumerate(zip(self.spans, slots.tolist(), strict=True))
        ]
        slots_of: dict[int, list[int]] = {}
        for index, position, slot in (*snapshots, *ends):
            slots_of.setdefault(self.block_ending[index, position], []).append(slot)
        return slots_of


def lay_grid(spans: Sequence[Span], snapshots: Sequence[SlotAt], chunk_len: int) -> Grid:
    """Cuts every span at the multiples of `chunk_len`, and at its snapshots."""
    firsts, cells, ends = [0], [], dict[tuple[int, int], int]()
    for index, blocks in enumerate(cut_blocks(spans, snapshots, chunk_len)):
        for number, (first, low, high) in enumerate(blocks, firsts[-1]):
            cells.append(torch.arange(low, high) + number * chunk_len)
            ends[index, first + high] = number
        firsts.append(firsts[-1] + len(blocks))
    return Grid(chunk_len, tuple(spans), tuple(firsts), ends, torch.cat(cells))


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


def check_spans(spans: Sequence[Span], snapshots: Sequence[SlotAt], tokens: int) -> None:
    """Asserts that no span is empty, that spans cover `tokens`, and that each snapshot is within
    its span or at its end."""
    assert all(end > start >= 0 for start, end in spans), spans
    assert sum(end - start for start, end in spans) == tokens, (spans, tokens)
    for index, position, _ in snapshots:
        start, end = spans[index]
        assert start < position <= end, (spans, snapshots)


Rows = tuple[tuple[int, ...], ...]


def describe_blocks(
    spans: Sequence[Span], snapshots: Sequence[SlotAt], chunk_len: int
) -> tuple[tuple[int, ...], Rows, tuple[int, ...]]:
    """Each request's first block; each block's (first token, low, high); each block's snapshot."""
    destinations = {(index, position): slot for index, position, slot in snapshots}
    assert len(destinations) == len(snapshots), f"two snapshots at one position: {snapshots}"
    firsts, described, wanted = [0], list[tuple[int, ...]](), list[int]()
    cut, tokens = cut_blocks(spans, snapshots, chunk_len), first_tokens(spans)
    for index, ((start, _), token) in enumerate(zip(spans, tokens, strict=False)):
        for first, low, high in cut[index]:
            described.append((token + first - start, low, high))
            wanted.append(destinations.get((index, first + high), -1))
        firsts.append(len(described))
    return tuple(firsts), tuple(described), tuple(wanted)
