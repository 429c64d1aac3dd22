"""A worker whose handling of one request throws: that request ends typed, the others go on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest
from tests.doubles.fake_engine import FakeEngine
from tests.harness.pair import WorkerPair, expected, fake_engine, pair_of_workers, request
from tests.waiting import until

from ferryman.cache.planner import Planner
from ferryman.engine.stream import StreamPoisoned
from ferryman.errors import FerrymanError, OutOfSlots
from ferryman.schedule import prefill
from ferryman.schedule.events import ChunkDone, Event, RequestFailed
from ferryman.schedule.postprocess import Postprocessor
from ferryman.schedule.tree_publisher import TreePublisher
from ferryman.wire.values import Failure
from ferryman.worker.host import NoHostTier
from ferryman.worker.loop import hear_each
from ferryman.worker.numeric_watch import NumericWatch
from ferryman_decode.decode_request import DecodeRequest
from ferryman_decode.requests import Requests

GUILTY = "guilty"


class BrokenStage(RuntimeError):
    """The error that these tests raise."""


def is_about_the_guilty(value: object) -> bool:
    for name in ("request", "context"):
        value = getattr(value, name, value)
    return str(getattr(value, "request_id", "")).startswith(GUILTY)


def plant(to: pytest.MonkeyPatch, owner: Any, name: str, error: Exception) -> list[str]:
    """Makes a function raise for the guilty request; the returned list shows that it did."""
    original, thrown = getattr(owner, name), []

    def throwing(*args: Any, **kwargs: Any) -> Any:
        if any(map(is_about_the_guilty, args)):
            thrown.append(name)
            raise error
        return original(*args, **kwargs)

    to.setattr(owner, name, throwing)
    return thrown


async def innocents_are_answered(pair: WorkerPair, beside: Callable[[], Any]) -> None:
    """Two requests, one of them under way while `beside` runs."""
    first = request("r0", [1] * 9, max_tokens=30)
    await pair.run_prefill(pair.order(first))
    await beside()
    second = request("r2", [4] * 17)
    await pair.run_prefill(pair.order(second))
    for asked in (first, second):
        assert (await pair.read_tokens(asked.request_id))[0] == expected(asked)
    await until(lambda: not pair.leased())
    for side in (pair.prefill, pair.decode):
        side.engine.scheduler.check_integrity()
        assert all(one.balances for one in side.engine.scheduler.ledgers().values())


AT_PREFILL: dict[str, tuple[Any, str]] = {
    "a chunk is planned": (prefill, "cut_chunk"),
    "a prompt is committed": (TreePublisher, "publish_prompt"),
    "an event is heard": (NoHostTier, "cached"),
}


@pytest.mark.parametrize("place", AT_PREFILL)
async def test_an_error_at_prefill_ends_one_attempt_with_a_typed_error(
    place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "ferryman")
    async with pair_of_workers() as pair:

        async def guilty() -> None:
            with monkeypatch.context() as patched:
                thrown = plant(patched, *AT_PREFILL[place], BrokenStage(place))
                with pytest.raises(FerrymanError) as failed:
                    await pair.run_prefill(pair.order(request(GUILTY, [2] * 14)))
                assert thrown
            assert failed.value.code == "INTERNAL"

        await innocents_are_answered(pair, guilty)


AT_DECODE: dict[str, tuple[Any, str]] = {
    "a token is committed": (Postprocessor, "_append_token"),
    "an event is heard": (Requests, "_apply"),
    "a frame is made": (DecodeRequest, "tokens_from"),
}


@pytest.mark.parametrize("place", AT_DECODE)
async def test_an_error_at_decode_ends_one_request_with_a_typed_error(
    place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "ferryman")
    async with pair_of_workers() as pair:

        async def guilty() -> None:
            pair.decode.hold()
            await pair.run_prefill(pair.order(request(GUILTY, [2] * 14, max_tokens=20)))
            with monkeypatch.context() as patched:
                thrown = plant(patched, *AT_DECODE[place], BrokenStage(place))
                pair.decode.go_on()
                await until(lambda: bool(thrown))
            _, last = await asyncio.wait_for(pair.read_tokens(GUILTY), 120)
            assert isinstance(last.ending, Failure)
            assert (last.ending.code, last.ending.reason) == ("INTERNAL", "Internal")

        await innocents_are_answered(pair, guilty)


async def test_an_error_of_the_taxonomy_keeps_its_type(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "ferryman")
    async with pair_of_workers() as pair:
        thrown = plant(monkeypatch, Planner, "plan_cold", OutOfSlots("not now"))
        monkeypatch.setattr(Planner, "plans", throwing_plans(thrown))
        with pytest.raises(OutOfSlots, match="not now"):
            await pair.run_prefill(pair.order(request(GUILTY, [2] * 14)))
        assert thrown


def throwing_plans(thrown: list[str]) -> Callable[..., Any]:
    def plans(*_: Any, **__: Any) -> Any:
        thrown.append("plans")
        raise OutOfSlots("not now")

    return plans


async def ask_one_of_a_pair() -> None:
    async with pair_of_workers() as pair:
        await asyncio.wait_for(pair.run_prefill(pair.order(request("r1", [2] * 14))), 120)


async def test_a_step_that_fails_on_the_device_still_ends_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The content of the slots is unknown after that."""
    broken: list[str] = []

    def launch(_engine: FakeEngine, _plan: object) -> None:
        broken.append("launch")
        raise BrokenStage("the device")

    monkeypatch.setattr(FakeEngine, "launch", launch)
    with pytest.raises(BaseExceptionGroup) as ended:
        await ask_one_of_a_pair()
    assert broken
    assert ended.value.subgroup((BrokenStage, StreamPoisoned)) is not None


def test_nothing_more_is_heard_of_a_request_that_failed() -> None:
    heard: list[str] = []

    def hear(event: Event) -> None:
        heard.append(event.request_id)
        if event.request_id == GUILTY:
            raise BrokenStage("heard")

    def fail(event: RequestFailed) -> None:
        heard.append(f"{event.request_id} failed")

    with fake_engine() as engine:
        events = [ChunkDone(name, 0, 4, 8) for name in (GUILTY, "r1", GUILTY, "r1")]
        watch = NumericWatch("decode-1", lambda: None)
        hear_each(engine.scheduler, watch, events, hear, fail)
        hear_each(engine.scheduler, watch, engine.scheduler.take_events(), hear, fail)
    assert heard == [GUILTY, "r1", "r1", f"{GUILTY} failed"]
