"""How long requests wait while a role has no worker, and what they are told; with `now` given."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from tests.harness.router.queueing import STATE

from ferryman.errors import NoWorker
from ferryman.wire.nats.heartbeat import Heartbeat, StartBeat, StartPhase
from ferryman_router.routing.fleet import Fleet, WorkerName
from ferryman_router.routing.worker_starts import (
    FIRST_START_SECONDS,
    MAX_FAILED_STARTS,
    MAX_UNSEEN_SECONDS,
    STANDSTILL_SECONDS,
    RolePatience,
)

BEAT_TIMEOUT, SECONDS, START = 8.0, 10.0, 25.0


@dataclass
class Room:
    """A fleet and its patience; time is moved on in steps of a second, as routers look."""

    fleet: Fleet = field(default_factory=lambda: Fleet(BEAT_TIMEOUT))
    now: float = 0.0

    def __post_init__(self) -> None:
        self.patience = RolePatience(
            self.fleet.starts, self.fleet.is_served, SECONDS, self.fleet.discord
        )
        self.patience.look(self.now)

    def pass_time(self, seconds: float, *, beats: bool = True) -> None:
        """Those that serve go on to beat."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 1.0)
            for worker in self.fleet if beats else ():
                self.fleet.on_heartbeat(worker.beat, self.now)
            self.fleet.expire(self.now)
            self.patience.look(self.now)

    def joins(self, role: str, epoch: int = 1, start_seconds: float = START) -> None:
        self.fleet.on_heartbeat(
            Heartbeat(
                role,
                f"{role}-{epoch}",
                epoch,
                f"{role}:{epoch}",
                True,
                STATE,
                1000,
                start_seconds=start_seconds,
            ),
            self.now,
        )
        self.patience.look(self.now)

    def starts(
        self,
        role: str = "decode",
        epoch: int = 2,
        seconds: float = 0.0,
        phase: StartPhase = StartPhase.COMPILING,
        done: int = 0,
    ) -> None:
        beat = StartBeat(role, f"{role}-{epoch}", epoch, phase, done, 0, seconds)
        self.fleet.starts.on_start_beat(beat, self.now)
        self.patience.look(self.now)

    def loses(self, role: str, epoch: int = 1) -> None:
        self.fleet.lose(WorkerName(f"{role}-{epoch}", epoch), "killed")
        self.patience.look(self.now)

    @property
    def refusal(self) -> NoWorker:
        refusal = self.patience.refusal(self.now)
        assert refusal is not None, "it is refused"
        return refusal


@pytest.fixture
def room() -> Room:
    return Room()


@pytest.fixture
def served(room: Room) -> Room:
    room.joins("prefill")
    room.joins("decode")
    return room


def is_waited(room: Room) -> bool:
    return room.patience.refusal(room.now) is None


def test_before_any_start_was_heard_of_a_start_is_waited_for(room: Room) -> None:
    room.pass_time(SECONDS + FIRST_START_SECONDS - 1)
    assert is_waited(room)
    room.pass_time(1)
    assert str(room.refusal).startswith("the cluster is starting: no prefill worker has reported")
    assert room.refusal.retry_after_seconds == FIRST_START_SECONDS


def test_an_empty_role_is_waited_for_as_long_as_its_last_start_took(served: Room) -> None:
    """From when it became empty: whoever asks in between does not begin it anew."""
    served.pass_time(1000)
    served.loses("decode")
    served.pass_time(SECONDS + START - 1)
    assert is_waited(served)
    served.pass_time(1)
    assert str(served.refusal) == (
        "no decode worker is ready: no decode worker has reported a start for 35 s;"
        " the last start of a decode worker took 25 s"
    )
    served.joins("decode", epoch=2)
    served.pass_time(1000)
    assert is_waited(served)


def test_a_time_in_which_the_router_stood_still_is_no_wait(served: Room) -> None:
    """It heard of no worker then; what came meanwhile is read behind its first look."""
    served.loses("decode")
    served.pass_time(SECONDS + START - 2)
    for seconds in (1000.0, MAX_UNSEEN_SECONDS + 0.1):
        served.now += seconds
        served.patience.look(served.now)
        assert is_waited(served)
    served.pass_time(2)
    assert not is_waited(served), "the time before counts"


def test_a_router_that_looks_seldom_does_not_stand_still(served: Room) -> None:
    served.loses("decode")
    for _ in range(round((SECONDS + START) / MAX_UNSEEN_SECONDS) + 1):
        served.now += MAX_UNSEEN_SECONDS
        served.patience.look(served.now)
    assert not is_waited(served)


def test_a_start_that_advances_is_waited_for_however_long_it_takes(served: Room) -> None:
    served.loses("decode")
    for number in range(500):
        served.starts(seconds=number, done=number // 100)
        served.pass_time(1)
        assert is_waited(served), number
    served.joins("decode", epoch=2, start_seconds=501.0)
    assert served.patience.seconds_for("decode") == SECONDS + 501.0
    assert served.patience.seconds_for("prefill") == SECONDS + START


def test_a_start_that_stands_still_is_not_waited_for(served: Room) -> None:
    served.loses("decode")
    waits = STANDSTILL_SECONDS + SECONDS + START
    for number in range(round(waits)):
        assert is_waited(served), number
        served.starts(seconds=number, done=3)
        served.pass_time(1)
    served.pass_time(1)
    assert "decode-2 is compiling loops, 3 so far" in str(served.refusal)
    assert "and does not get on" in str(served.refusal)
    served.starts(seconds=200, done=4)
    assert is_waited(served), "it does again"


def test_a_worker_that_dies_in_each_start_is_not_waited_for_without_end(served: Room) -> None:
    served.loses("decode")
    for epoch in range(2, 40):
        served.starts(epoch=epoch)
        served.pass_time(BEAT_TIMEOUT + 1)
        if not is_waited(served):
            break
    waited = (BEAT_TIMEOUT + 1) * MAX_FAILED_STARTS + SECONDS + START
    assert waited - BEAT_TIMEOUT <= served.now <= waited + BEAT_TIMEOUT


def test_a_start_that_began_before_others_failed_is_waited_for(served: Room) -> None:
    served.loses("decode")
    for number in range(120):
        served.starts(epoch=2, seconds=number, done=number)
        if number < 50:
            served.starts(epoch=100 + number // 2)
        served.pass_time(1)
    assert is_waited(served)


def test_a_start_that_was_only_silent_has_not_failed(served: Room) -> None:
    served.loses("decode")
    for number in range(2 * MAX_FAILED_STARTS):
        served.starts(epoch=2, seconds=number, done=number)
        served.pass_time(BEAT_TIMEOUT + 1)
    served.starts(epoch=3)
    assert served.fleet.starts.is_advancing("decode", served.now)


def test_a_start_is_over_when_its_worker_serves(served: Room) -> None:
    served.loses("decode")
    served.starts(epoch=2)
    assert served.fleet.starts.is_advancing("decode", served.now)
    served.joins("decode", epoch=2)
    assert not served.fleet.starts.is_advancing("decode", served.now)


def test_one_good_start_makes_up_for_those_that_failed(served: Room) -> None:
    served.loses("decode")
    for epoch in range(2, 2 + MAX_FAILED_STARTS):
        served.starts(epoch=epoch)
        served.pass_time(BEAT_TIMEOUT + 1)
    served.starts(epoch=20)
    assert not served.fleet.starts.is_advancing("decode", served.now)
    served.joins("decode", epoch=30)
    served.loses("decode", epoch=30)
    served.starts(epoch=31)
    assert served.fleet.starts.is_advancing("decode", served.now)


def test_silence_of_a_start_does_not_count_while_nobody_can_be_heard(served: Room) -> None:
    served.loses("decode")
    served.starts(epoch=2)
    for _ in range(50):
        served.now += 1
        served.fleet.reset_timeouts(served.now)
    served.pass_time(1)
    assert served.fleet.starts.is_advancing("decode", served.now)


def test_a_caller_is_told_what_is_done_and_when_to_come_back(served: Room) -> None:
    assert served.patience.refusal_at_deadline(served.now) is None
    served.loses("decode")
    served.starts(seconds=4.0, done=7)
    served.pass_time(2)
    refusal = served.patience.refusal_at_deadline(served.now)
    assert str(refusal) == (
        "no decode worker is ready: decode-2 is compiling loops, 7 so far, 6 s after it began;"
        " the last start of a decode worker took 25 s"
    )
    assert refusal is not None
    assert refusal.retry_after_seconds == pytest.approx(START - 6.0)
    served.starts(seconds=500.0, done=8)
    refusal = served.patience.refusal_at_deadline(served.now)
    assert refusal is not None
    assert refusal.retry_after_seconds == 1.0, "any moment now"


def test_it_is_a_first_start_until_every_role_was_ready_once(room: Room) -> None:
    room.joins("prefill")
    assert room.patience.is_first_start
    room.loses("prefill")
    room.joins("decode")
    assert not room.patience.is_first_start, "both were, if not together"


def test_a_worker_that_does_both_starts_for_both(room: Room) -> None:
    for number in range(100):
        room.starts("both", seconds=number, done=number)
        room.pass_time(1)
    assert is_waited(room)
    room.joins("both", epoch=2, start_seconds=40.0)
    assert room.patience.seconds_for("prefill") == room.patience.seconds_for("decode") == 50.0
