"""Rank 0 and the others: one order of commands, and no rank that is lost unnoticed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from tests.processes import ranks_of
from tests.tiny_models import save_tiny_model

from ferryman.engine.rank import EXIT_ORPHANED, Command, RankOrders
from ferryman.engine.rank_channel import Channel
from ferryman.engine.rank_group import RankLost
from ferryman.engine.stream import StreamPoisoned
from ferryman.engine.team import start_rank
from ferryman.llm import LLM
from ferryman.schedule.request import SamplingParams

PATIENCE_SECONDS = 60.0
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
VECTOR = np.array([Command.RUN, 5, 7], np.int64)


@pytest.fixture
def pipes() -> Iterator[list[tuple[Connection, Connection]]]:
    made = [Pipe(), Pipe()]
    yield made
    for ends in made:
        for end in ends:
            end.close()


def channel_of(pipes: list[tuple[Connection, Connection]], silence_seconds: float) -> Channel:
    channel = Channel([own for own, _ in pipes], silence_seconds)
    channel.listen()
    return channel


def test_what_all_ranks_have_answered_is_done_and_nothing_before(
    pipes: list[tuple[Connection, Connection]],
) -> None:
    channel = channel_of(pipes, PATIENCE_SECONDS)
    first, second = channel.tell(VECTOR), channel.tell(VECTOR)
    (_, one), (_, other) = pipes
    for rank in (one, other):
        assert np.frombuffer(rank.recv_bytes(), np.int64).tolist() == VECTOR.tolist()
    for _ in (first, second):
        one.send_bytes(b'{"done": 1}')
    assert not channel.is_answered(first)
    other.send_bytes(b'{"done": 1}')
    channel.wait(first)
    assert channel.is_answered(first)
    assert not channel.is_answered(second)


def test_a_rank_that_is_silent_is_lost(pipes: list[tuple[Connection, Connection]]) -> None:
    channel = channel_of(pipes, silence_seconds=0.01)
    pipes[0][1].send_bytes(b'{"done": 1}')
    with pytest.raises(RankLost, match=r"rank 2 was silent for 0.01 s|rank 1 was silent"):
        channel.wait(channel.tell(VECTOR))
    with pytest.raises(RankLost):
        channel.tell(VECTOR)


def test_a_rank_that_failed_says_why(pipes: list[tuple[Connection, Connection]]) -> None:
    channel = channel_of(pipes, PATIENCE_SECONDS)
    number = channel.tell(VECTOR)
    pipes[1][1].send_bytes(json.dumps({"failed": "ValueError: no such slot"}).encode())
    with pytest.raises(RankLost, match="rank 2 failed: ValueError: no such slot"):
        channel.wait(number)
    assert channel.is_answered(number), "waiting would not help"


def test_a_rank_that_ends_is_lost_while_nobody_waits(
    pipes: list[tuple[Connection, Connection]],
) -> None:
    channel = channel_of(pipes, PATIENCE_SECONDS)
    pipes[0][1].close()
    with pytest.raises(RankLost, match="rank 1 ended"):
        channel.lost.result(PATIENCE_SECONDS)


def test_ranks_may_end_once_the_channel_closes(pipes: list[tuple[Connection, Connection]]) -> None:
    channel = channel_of(pipes, PATIENCE_SECONDS)
    channel.close()
    for _, theirs in pipes:
        assert np.frombuffer(theirs.recv_bytes(), np.int64).tolist() == [Command.CLOSE]
        theirs.close()
    assert not channel.lost.done()


def test_a_killed_rank_fails_the_step_and_poisons_the_stream(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, "granite_nope")
    with LLM(folder, page_size=16, memory_bytes=1 << 24, overlap=False, tp_size=2) as llm:
        llm.generate([[5, 6, 7]], GREEDY)
        (rank,) = ranks_of(os.getpid())
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(RankLost, match="rank 1 ended"):
            llm._engine.lost.result(PATIENCE_SECONDS)
        with pytest.raises(RankLost):
            llm.generate([[5, 6, 7, 8]], GREEDY)
        with pytest.raises(StreamPoisoned):
            llm._engine.stream.call(lambda: None)
    assert ranks_of(os.getpid()) == []


def test_a_rank_ends_when_rank_0_does(tmp_path: Path) -> None:
    """However it ended: all that the rank can see is that the socket has closed."""
    folder = save_tiny_model(tmp_path, "granite_nope")
    meeting = str(tmp_path / "meeting")
    orders = RankOrders(str(folder), "", "float64", 16, "cpu", 1, 0, 1, meeting, PATIENCE_SECONDS)
    process, connection = start_rank(orders)
    for said in ("here", "ready"):
        assert said in json.loads(connection.recv_bytes())
    connection.close()
    assert process.wait(PATIENCE_SECONDS) == EXIT_ORPHANED
