"""Runs of tokens, as a CPU scans recurrences: token by token, prefill as decode.

A *run* is some consecutive tokens of one request, and the slot that gets the state after them, or
a negative one for none. A request's runs follow each other: the first reads the request's source
slot (a negative one reads as cleared), the others go on from the state before them. If two states
are kept at one position, the second run has no tokens.

A token's result follows from the state before it and from the token, so where runs
and chunks begin, and how long they are, changes no bit (decision 0137).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ferryman_kernels.ragged import SlotAt, Span, first_tokens


class TokenRuns(NamedTuple):
    """`sources` [requests] are slots; request i has runs firsts[i] to firsts[i + 1]. Of each run
    [runs]: its first token, the number of its tokens, the slot `kept` that gets the state after
    them."""

    sources: Any
    firsts: Any
    tokens: Any
    counts: Any
    kept: Any


def prefill_runs(spans: Sequence[Span], slots: Tensor, snapshots: Sequence[SlotAt]) -> TokenRuns:
    """Each request's span, from the state of its slot to that slot, cut at its snapshots."""
    begins, firsts, rows = first_tokens(spans), [0], list[tuple[int, int, int]]()
    for index, ((start, end), slot) in enumerate(zip(spans, slots.tolist(), strict=True)):
        stops = sorted((position, dst) for i, position, dst in snapshots if i == index)
        done = start
        for position, dst in (*stops, (end, slot)):
            rows.append((begins[index] + done - start, position - done, dst))
            done = position
        firsts.append(len(rows))
    tokens, counts, kept = np.array(rows).T.copy()
    return TokenRuns(slots.numpy(), np.array(firsts), tokens, counts, kept)


def decode_runs(slots: Tensor, into: Tensor) -> TokenRuns:
    """One token of each request, from the state at `slots` to the slots `into`."""
    numbers, ones = _one_token_each(len(slots))
    return TokenRuns(slots.numpy(), numbers, numbers[:-1], ones, into.numpy())


@lru_cache(maxsize=512)
def _one_token_each(requests: int) -> tuple[Any, Any]:
    return np.arange(requests + 1), np.ones(requests, np.int64)
