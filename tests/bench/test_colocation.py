"""Streams while prompts arrive: what belongs to a span, what is good, and the table of clusters."""

from __future__ import annotations

import io
import os
from time import process_time
from typing import Any, cast

import pytest
from rich.console import Console

from ferryman_bench.bench_cluster import BenchCluster
from ferryman_bench.colocation import (
    ArrivalRound,
    ColocationResult,
    TokenGap,
    gaps_between,
    setups_of,
    show_colocation,
)


def tokens(*times: float) -> list[TokenGap]:
    return [TokenGap(time, time / 4) for time in times]


def test_a_gap_belongs_to_the_span_in_which_it_ends() -> None:
    streams = [tokens(1.0, 2.0, 4.0, 8.0), tokens(3.0, 3.5)]
    assert gaps_between(streams, 2.0, 4.0) == (TokenGap(2.0, 0.5), TokenGap(0.5, 0.125))
    assert gaps_between(streams, 9.0, 10.0) == ()


def round_of(quiet: float, *busy: float) -> ArrivalRound:
    def gaps(*seconds: float) -> tuple[TokenGap, ...]:
        return tuple(TokenGap(each, each / 2) for each in seconds)

    return ArrivalRound(gaps(quiet, quiet), gaps(*busy), (5.0,), busy_seconds=10.0)


def test_rounds_are_compared_within_themselves_and_late_tokens_are_not_good() -> None:
    found = ColocationResult("x", (round_of(0.1, 0.1, 0.2, 0.3), round_of(0.2, 0.2)), 0.25)
    said = found.to_json()
    assert said["slowdowns"] == pytest.approx([2.0, 1.0])
    assert said["slowdown"] == said["processor_slowdown"] == pytest.approx(1.5)
    assert said["stream_tokens_per_second"] == pytest.approx((0.3 + 0.1) / 2)
    assert said["good_tokens_per_second"] == pytest.approx((0.2 + 0.1) / 2)
    assert (said["first_token_seconds"], said["gap_limit_ms"]) == (5.0, 250.0)
    assert said["median"] == said["busy_gap_ms"][0] == pytest.approx(200.0)


def test_two_roles_stand_beside_one_worker_with_each_length_of_chunks_and_beside_two() -> None:
    found = [(one.name, one.chunk_tokens, dict(one.workers)) for one in setups_of((512, 128))]
    both: dict[str, Any] = {"worker": "both"}
    assert found == [
        ("1+1, chunks of 512", 512, {}),
        ("both × 1, chunks of 512", 512, both),
        ("both × 1, chunks of 128", 128, both),
        ("both × 2, chunks of 512", 512, {**both, "num_both": 2}),
    ]


def test_the_table_says_both_clocks_and_the_limit() -> None:
    console = Console(file=io.StringIO(), width=100)
    show_colocation("bench", [ColocationResult("1+1", (round_of(0.1, 0.2),), 0.1)], console)
    said = cast(io.StringIO, console.file).getvalue()
    for words in (
        "100 / 100",
        "200 / 200",
        "2.00",
        "processor",
        "50 / 50",
        "at most 100 ms",
        "load",
    ):
        assert words in said


def test_a_workers_processor_time_is_that_of_its_process() -> None:
    cluster = BenchCluster(cast(Any, None), {"both-00000001": os.getpid()})
    before = process_time()
    seen = cluster.processor_seconds("both-00000001")
    assert before <= seen <= process_time()
