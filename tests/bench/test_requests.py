"""Whole requests: what a round's times mean, and llama.cpp's steps as its server makes them."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Sequence
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray
from rich.console import Console

from ferryman.client import Client, GenerateEvent, SamplingParams, TokenChunk
from ferryman_bench.contender_process import LLAMA_BATCHES
from ferryman_bench.llama_peer import BATCH_TOKENS, LlamaContext, SequenceRows
from ferryman_bench.request_load import ServedLoad, ServedRound, served, show_loads
from ferryman_bench.request_sites import LlamaRequest, answer_step


class CountedContext:
    """Notes the rows of every step, and draws the number of the step."""

    def __init__(self) -> None:
        self.steps: list[list[tuple[int, int, int, bool]]] = []

    def step(self, rows: Sequence[SequenceRows]) -> NDArray[np.int32]:
        said = [(row.sequence, row.position, len(row.token_ids), row.draws) for row in rows]
        self.steps.append(said)
        return np.full(sum(row.draws for row in rows), len(self.steps), np.int32)


class ChunkedClient:
    """A client whose every answer comes as chunks of one, then of two tokens."""

    async def generate(
        self, prompt: list[int], sampling: SamplingParams, *, deadline_seconds: float
    ) -> AsyncIterator[GenerateEvent]:
        assert sampling.ignore_eos
        yield TokenChunk(0, (5,), "")
        yield TokenChunk(1, (6, 7), "")


def test_prompts_fill_the_batch_behind_the_requests_that_decode() -> None:
    context = CountedContext()
    long = np.zeros(BATCH_TOKENS - 100, np.int32)
    requests = [LlamaRequest(index, long, 3) for index in range(2)]
    while live := [request for request in requests if not request.is_finished]:
        answer_step(cast(LlamaContext, context), live)
    rest = len(long) - 100
    assert context.steps == [
        # The second prompt gets the room that the first one leaves.
        [(0, 0, len(long), True), (1, 0, 100, False)],
        [(0, len(long), 1, True), (1, 100, rest, True)],
        [(0, len(long) + 1, 1, True), (1, len(long), 1, True)],
        [(1, len(long) + 1, 1, True)],
    ]
    assert [len(request.arrivals) for request in requests] == [3, 3]


async def test_each_token_of_a_chunk_arrives_with_it() -> None:
    found = await served(cast(Client, ChunkedClient()), [[1], [2]], max_tokens=3)
    assert [len(tokens) for tokens in found.arrivals] == [3, 3]
    assert all(tokens[1] == tokens[2] for tokens in found.arrivals)
    assert len(found.gaps) == 4


def test_first_tokens_and_gaps_are_those_of_each_request() -> None:
    found = ServedRound(5.0, ((1.0, 1.5, 3.5), (2.0, 5.0)))
    assert found.firsts == [1.0, 2.0]
    assert found.gaps == [0.5, 2.0, 3.0]


def test_a_load_is_compared_round_by_round() -> None:
    ours, theirs = _load("offline", 1.0, 4.0), _load(LLAMA_BATCHES, 2.0, 4.0)
    assert ours.rate == 8 * 16 / 2.5
    assert ours.ratio(theirs) == pytest.approx((2.0 + 1.0) / 2)


def test_the_table_of_requests_fits_and_leaves_empty_what_was_not_timed() -> None:
    out = io.StringIO()
    loads = [_load("offline", 1.0, 1.0), _load(LLAMA_BATCHES, 2.0, 2.0, timed=True)]
    show_loads("a shape", loads, Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    offline = next(line for line in lines if "offline, 8" in line)
    assert [cell.strip() for cell in offline.split("│")[1:-1]] == [
        "offline, 8",
        "128",
        "2.00",
        "",
        "",
    ]
    assert any("500 / 500" in line and "250 / 250" in line for line in lines)


def _load(engine: str, *seconds: float, timed: bool = False) -> ServedLoad:
    arrivals = ((0.5, 0.75, 1.0),) if timed else ()
    return ServedLoad(engine, 8, 16, tuple(ServedRound(one, arrivals) for one in seconds))
