"""Rank 0 and the others: one order of commands, and no rank that is lost unnoticed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic

import numpy as np
import pytest
from tests.processes import ranks_of
from tests.tiny_models import save_tiny_model

from ferryman.engine.stream import StreamPoisoned
from ferryman.engine.tensor_parallel.channel import Channel
from ferryman.engine.tensor_parallel.group import start_rank
from ferryman.engine.tensor_parallel.rank import EXIT_ORPHANED, Command, RankOrders
from ferryman.engine.tensor_parallel.rendezvous import RankLost
from ferryman.llm import LLM
from ferryman.schedule.request import SamplingParams

PATIENCE_SECONDS = 60.0
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
DONE = b'{"done": 1}'
VECTOR = np.array([Command.RUN, 5, 7], np.int64)


@dataclass(frozen=True, slots=True)
class Two:
    """A channel to two ranks, and the ends of it that they would hold."""

    channel: Channel
    theirs: list[Connection]


@contextmanager
def two_ranks(clock: Callable[[], float] = monotonic) -> Iterator[Two]:
    pipes = [Pipe(), Pipe()]
    channel = Channel([own for own, _ in pipes], PATIENCE_SECONDS, clock)
    channel.start_listening()
    yield Two(channel, [theirs for _, theirs in pipes])
    for _, theirs in pipes:
        theirs.close()
    channel.join()
    for own, _ in pipes:
        own.close()


def test_what_all_ranks_have_answered_is_done_and_nothing_before() -> None:
    with two_ranks() as two:
        channel, (one, other) = two.channel, two.theirs
        first, second = channel.send(VECTOR), channel.send(VECTOR)
        for rank in (one, other):
            assert np.frombuffer(rank.recv_bytes(), np.int64).tolist() == VECTOR.tolist()
        for _ in (first, second):
            one.send_bytes(DONE)
        assert not first.has_reply()
        other.send_bytes(DONE)
        first.wait()
        assert first.has_reply()
        assert not second.has_reply()


def test_a_rank_that_is_silent_for_too_long_is_lost() -> None:
    """The time counts from the send or from the rank's last reply, whichever is later: a step waits
    for earlier ones."""
    now = [100.0]
    with two_ranks(clock=lambda: now[0]) as two:
        first, second = two.channel.send(VECTOR), two.channel.send(VECTOR)
        for theirs in two.theirs:
            theirs.send_bytes(DONE)
        first.wait()
        now[0] += PATIENCE_SECONDS - 1
        assert not second.has_reply()
        now[0] += 2
        assert second.has_reply(), "waiting would not help"
        with pytest.raises(RankLost, match=f"rank 1 was silent for {PATIENCE_SECONDS:g} s"):
            second.wait()
        with pytest.raises(RankLost):
            two.channel.send(VECTOR)


def test_a_rank_that_does_not_read_is_lost() -> None:
    own, theirs = Pipe()
    with own, theirs:
        with pytest.raises(RankLost, match="rank 1 is gone or silent"):
            Channel([own], silence_seconds=0.05).send(np.zeros(1 << 21, np.int64))


def test_a_rank_that_failed_says_why() -> None:
    with two_ranks() as two:
        told = two.channel.send(VECTOR)
        two.theirs[1].send_bytes(json.dumps({"failed": "ValueError: no such slot"}).encode())
        with pytest.raises(RankLost, match="rank 2 failed: ValueError: no such slot"):
            told.wait()
        assert told.has_reply(), "waiting would not help"


def test_a_rank_that_ends_is_lost_while_nobody_waits() -> None:
    with two_ranks() as two:
        two.theirs[0].close()
        with pytest.raises(RankLost, match="rank 1 ended"):
            two.channel.lost.result(PATIENCE_SECONDS)


def test_ranks_may_end_once_the_channel_closes() -> None:
    with two_ranks() as two:
        two.channel.close()
        for theirs in two.theirs:
            assert np.frombuffer(theirs.recv_bytes(), np.int64).tolist() == [Command.CLOSE]
            theirs.close()
        two.channel.join()
        assert not two.channel.lost.done()


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
    orders = RankOrders(
        str(folder),
        "",
        "float64",
        "none",
        "auto",
        "any",
        16,
        "cpu",
        1,
        0,
        1,
        meeting,
        PATIENCE_SECONDS,
    )
    process, connection = start_rank(orders)
    for said in ("here", "ready"):
        assert said in json.loads(connection.recv_bytes())
    connection.close()
    assert process.wait(PATIENCE_SECONDS) == EXIT_ORPHANED
