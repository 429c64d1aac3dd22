"""`ferryman roll`: the order, and when it does not begin."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ferryman.cache.manifest import Kind
from ferryman.errors import FerrymanError, InvalidRequest, NotFound, Unavailable
from ferryman.runtime.life import alongside
from ferryman.wire.nats.bus import BusMessage, Messages
from ferryman.wire.nats.heartbeat import Heartbeat, ServedState, beat_to_bytes
from ferryman_cli import lifecycle_reader, roll
from ferryman_cli.app import run
from ferryman_cli.roll import RollChoice, check_next, roll_plan
from ferryman_launcher.state_folder import RunningCluster, StateFolder

STATE = ServedState("f", 16, "d", (Kind.FULL,))
LAST = ("hostcache-1", "hostcache-2", "router-1", "router-2")
CAREFUL, BOLD = RollChoice(takes_last=False, patience=120.0), RollChoice(True, 120.0)


def beat(role: str, number: int) -> Heartbeat:
    return Heartbeat(role, f"{role}-{number}", 1, f"h:{number}", True, STATE, 4096)


ROLES = ("router", "hostcache", "prefill", "decode")
WHOLE = [beat(role, number) for number in (1, 2) for role in ROLES]
ALONE = [beat("hostcache", 1), beat("prefill", 1), beat("decode", 1), beat("decode", 2)]


def test_decode_workers_go_first_and_routers_last() -> None:
    names = [one.worker_id for one in roll_plan(WHOLE, CAREFUL).goes]
    assert names == ["decode-1", "decode-2", "prefill-1", "prefill-2", *LAST]


def test_the_only_router_stays_unless_it_was_asked_for() -> None:
    alone = [one for one in WHOLE if one.worker_id != "router-2"]
    plan = roll_plan(alone, CAREFUL)
    assert [one.worker_id for one in plan.stays] == ["router-1"]
    assert (len(plan.goes), plan.goes[-1].role) == (len(alone) - 1, "hostcache")
    bold = roll_plan(alone, BOLD)
    assert (bold.stays, bold.goes[-1].worker_id) == ((), "router-1")


def test_the_last_router_does_not_go_though_there_were_two() -> None:
    """The other one left meanwhile, or is not ready yet."""
    one, other = beat("router", 1), beat("router", 2)
    check_next(one, [one, other], CAREFUL)
    for heard in ([one], [one, replace(other, is_ready=False)]):
        with pytest.raises(InvalidRequest, match="router-1 is the last ready router"):
            check_next(one, heard, CAREFUL)
        check_next(one, heard, BOLD)


class WatchedReport(roll.RollReport):
    """Sets an event when the roll waits."""

    def __init__(self, num_processes: int, *, as_json: bool) -> None:
        super().__init__(num_processes, as_json=as_json)
        self.has_waited = asyncio.Event()

    def waits(self, beat: Heartbeat, why: FerrymanError) -> None:
        super().waits(beat, why)
        self.has_waited.set()


async def test_a_roll_waits_for_a_process_that_is_out_of_sight_for_a_moment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A router that hears of no worker for a while, on a busy machine, is no reason to stop half
    way; one that stays so is."""
    monkeypatch.setattr(roll, "LISTEN_SECONDS", 0.02)
    messages = Messages()
    beats, report = roll.RecentBeats(messages), WatchedReport(2, as_json=True)
    unready = replace(beat("router", 2), is_ready=False)

    async def say_for_ever(said: list[Heartbeat]) -> None:
        while True:
            for one in said:
                messages.try_put(BusMessage("beat", beat_to_bytes(one)))
            await asyncio.sleep(0.001)

    said = [beat("router", 1), unready]
    async with alongside(say_for_ever(said)):
        await beats.listened()
        waiting = asyncio.create_task(roll.may_go(beats, beat("router", 1), CAREFUL, report))
        await asyncio.wait_for(report.has_waited.wait(), 120)
        assert json.loads(capsys.readouterr().out)["state"] == "waiting"
        assert not waiting.done()
        said[1] = beat("router", 2)
        assert await asyncio.wait_for(waiting, 120) == beat("router", 1)
        said[1] = unready
        await beats.listened()
        with pytest.raises(InvalidRequest, match="router-1 is the last ready router"):
            await roll.may_go(beats, beat("router", 1), replace(CAREFUL, patience=0.05), report)
        del said[0]
        await beats.listened()
        assert await roll.may_go(beats, beat("router", 1), CAREFUL, report) is None


def test_a_host_cache_may_be_the_only_one() -> None:
    assert [one.role for one in roll_plan([beat("hostcache", 1)], CAREFUL).goes] == ["hostcache"]


@pytest.mark.parametrize(
    ("heard", "error", "words"),
    [
        pytest.param([], NotFound, "no worker was heard", id="nobody"),
        pytest.param(ALONE, InvalidRequest, "prefill-1 is the last ready prefill", id="alone"),
        pytest.param(
            [*WHOLE[:-1], replace(WHOLE[-1], is_ready=False)],
            InvalidRequest,
            "decode-1 is the last ready decode",
            id="the other one drains",
        ),
    ],
)
def test_it_does_not_begin(
    heard: Sequence[Heartbeat], error: type[FerrymanError], words: str
) -> None:
    with pytest.raises(error, match=words):
        roll_plan(heard, CAREFUL)


def test_the_last_ones_go_when_that_was_asked_for() -> None:
    assert len(roll_plan(ALONE, BOLD).goes) == len(ALONE)
    with pytest.raises(Unavailable, match="drains already"):
        roll_plan([replace(one, is_ready=False) for one in ALONE], BOLD)


def test_without_a_broker_nothing_is_said_to_have_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle_reader, "CONNECT_SECONDS", 0.1)
    StateFolder(tmp_path).write(
        RunningCluster(
            "http://h:1", "h:2", "nats://127.0.0.1:1", "redis://h:4", "b", "m", os.getpid()
        )
    )
    assert run(["roll", "--state-dir", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert (said.out, said.err.startswith("error: ")) == ("", True)
