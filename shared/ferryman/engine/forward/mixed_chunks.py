"""A mixed step as chunks alone: a token of a running request is a chunk of one token.

Prefill and decode have one order of sums, so such a token has the bits that a decode step would
give it, and no layer needs a third way. Only its id is not in the plan: an earlier step wrote it
into the history of its row, maybe while this one was planned.

    prompts   chunks [start, end) of prompts, as they are
    tokens    a chunk [position, position + 1) of each running request, behind them

A token's state is read and written at its working slot, and its draw is the token after it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ferryman.cache.keys import as_token_ids
from ferryman.schedule.batch import Chunk, DecodeStep, Ints, MixedStep, PrefillStep
from ferryman.schedule.step_sizes import PADDING

UNREAD = as_token_ids([0])
"""In place of a token that only the device knows."""


def as_chunks(plan: MixedStep) -> PrefillStep:
    """The chunks of the prompts, and behind them one of each running request.

    Page tables and adapters are [chunks + tokens]. The halves have page tables of the same kinds.
    """
    prompts, tokens = plan.prompts, plan.tokens
    return PrefillStep(
        plan.step_id,
        plan.ops,
        prompts.chunks + tuple(_token_chunks(tokens)),
        {
            kind: _stacked(table, tokens.page_tables[kind])
            for kind, table in prompts.page_tables.items()
        },
        np.concatenate([prompts.adapters, tokens.adapters]),
    )


def _token_chunks(tokens: DecodeStep) -> Iterator[Chunk]:
    """A chunk of one token for each request, in the order of the step."""
    rows, slots = tokens.rows.tolist(), tokens.write_slots.tolist()
    places = zip(tokens.request_ids, rows, tokens.positions.tolist(), slots, strict=True)
    for (name, row, position, slot), draw in zip(places, tokens.draws, strict=True):
        yield Chunk(name, row, position, position + 1, UNREAD, slot, (), (draw,))


def _stacked(above: Ints, below: Ints) -> Ints:
    """Two page tables, one below the other, as wide as the wider one."""
    table = np.full(
        (len(above) + len(below), max(above.shape[1], below.shape[1])), PADDING, np.int64
    )
    table[: len(above), : above.shape[1]] = above
    table[len(above) :, : below.shape[1]] = below
    return table
