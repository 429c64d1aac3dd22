"""Whole requests: what a round's times mean, and the table of all engines."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from typing import cast

import pytest
from rich.console import Console

from ferryman.client import Client, GenerateEvent, SamplingParams, TokenChunk
from ferryman_bench.request_load import ServedLoad, ServedRound, served, show_loads

PEER = "another engine"


class ChunkedClient:
    """A client whose every answer comes as chunks of one, then of two tokens."""

    async def generate(
        self, prompt: list[int], sampling: SamplingParams, *, deadline_seconds: float
    ) -> AsyncIterator[GenerateEvent]:
        assert sampling.ignore_eos
        yield TokenChunk(0, (5,), "")
        yield TokenChunk(1, (6, 7), "")


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
    ours, theirs = _load("offline", 1.0, 4.0), _load(PEER, 2.0, 4.0)
    assert ours.rate == 8 * 16 / 2.5
    assert ours.ratio(theirs) == pytest.approx((2.0 + 1.0) / 2)


def test_the_table_of_requests_fits_and_leaves_empty_what_was_not_timed() -> None:
    out = io.StringIO()
    loads = [_load("offline", 1.0, 1.0), _load(PEER, 2.0, 2.0, timed=True)]
    show_loads("a shape", loads, PEER, Console(file=out, width=80))
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
