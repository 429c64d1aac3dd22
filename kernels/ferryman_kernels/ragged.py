"""The description of a ragged batch for kernels: host integers, one span for each request.

Or one span in numbers of the card, with padding behind it: its launches are the same wherever the
span begins and however long it is, so a graph can replay them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

Span = tuple[int, int]
"""Absolute positions [start, end) of one request's tokens; the batch holds them back to back."""

SlotAt = tuple[int, int, int]
"""(request_index, position, dst_slot): write the state at an absolute position to a slot."""


@dataclass(frozen=True, slots=True)
class PaddedSpan:
    """The tokens of one request, in the first `count` of `room` rows, from position `start` on.

    Both are int64 tensors without dimensions, on a card. The others are tables of a recurrence:
    `runs` [rounds, 6] are the rows of `runs_of_spans`, one after another, in five of six numbers,
    so that each begins at 16 bytes; `stores` [rounds, 4] those of the convolution's states, the
    last one of the state after the span. An empty run is of no token from row 1 on, so that
    neither its row nor the one before lies outside; a store of a negative length is none.
    """

    room: int
    start: Tensor
    count: Tensor
    runs: Tensor
    stores: Tensor

    def tiles(self, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Request, first row, its position and the number of tokens of each tile of at most `rows`
        rows, int64 [tiles]. Padding has tiles of no token."""
        lows = torch.arange(0, self.room, rows, device=self.count.device)
        counts = (self.count - lows).clamp(0, rows)
        return torch.zeros_like(lows), lows, self.start + lows, counts


Spans = Sequence[Span] | PaddedSpan


def on_host(spans: Spans) -> Sequence[Span]:
    """The spans as host integers, for code that has no other way."""
    assert not isinstance(spans, PaddedSpan), "only kernels of a card take a padded span"
    return spans


def check_rows(
    spans: Spans, by_request: Tensor, tokens: int, snapshots: Sequence[SlotAt] = ()
) -> None:
    """Asserts that spans cover `tokens` rows, that each has its row of `by_request`, and that
    snapshots lie within them. A padded span has its snapshots in its tables."""
    if isinstance(spans, PaddedSpan):
        assert (len(by_request), spans.room, len(snapshots)) == (1, tokens, 0), (spans, tokens)
        return
    assert len(by_request) == len(spans), (by_request.shape, spans)
    assert first_tokens(spans)[-1] == tokens, (spans, tokens)
    assert all(spans[i][0] < p <= spans[i][1] for i, p, _ in snapshots), (spans, snapshots)


def result_for(spans: Spans, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for a result of the shape of `like` [tokens, …]. No kernel writes rows of padding, and
    later layers must find numbers in them."""
    make = torch.zeros if isinstance(spans, PaddedSpan) else torch.empty
    return make(like.shape, dtype=dtype, device=like.device)


def first_tokens(spans: Sequence[Span]) -> list[int]:
    """The start of each request's tokens in the batch, and after the last one its end."""
    return list(accumulate((end - start for start, end in spans), initial=0))


@lru_cache(maxsize=32)
def on_device(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Host integers as an int64 table on `device`, copied once for all layers of a step."""
    table = torch.tensor(rows, dtype=torch.int64, device="cpu")
    if device.type == "cuda":
        return table.pin_memory().to(device, non_blocking=True)
    return table
