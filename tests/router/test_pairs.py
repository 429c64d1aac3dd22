"""Attempts give back the rows and turns that they took, also if they reached no worker."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.harness.router import (
    QUICK,
    SENTENCE,
    Die,
    FakeDecode,
    FakePrefill,
    FaultStage,
    RouterCluster,
    cluster,
    living,
)
from tests.waiting import until

from ferryman_router import components
from ferryman_router.request.context import Probation
from ferryman_router.routing import fleet_listener
from ferryman_router.routing.dispatcher import Dispatcher
from ferryman_router.routing.fleet import WorkerName
from ferryman_router.routing.routing_policy import Explanation

LIMITS = QUICK.model_copy(update={"no_worker_seconds": 60.0})


def leaves_when_chosen(
    patch: pytest.MonkeyPatch, made: RouterCluster, nth: int
) -> list[Explanation]:
    """The prefill worker of the nth choice leaves before it is asked; the choices so far."""
    place, choices = Dispatcher.place, list[Explanation]()

    async def placed(self: Dispatcher, *args: Any) -> Explanation:
        choices.append(await place(self, *args))
        if len(choices) == nth:
            left = choices[-1].chosen
            made.router.components.listener.apply(made.fleet.lose(left.prefill, "silent"))
            if len(made.decodes) > 1:  # the next pair is another one
                made.fleet.suspect(left.decode)
        return choices[-1]

    patch.setattr(Dispatcher, "place", placed)
    return choices


async def test_a_worker_that_leaves_before_it_is_asked_takes_no_row_at_decode_along(
    two_pairs: RouterCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = leaves_when_chosen(monkeypatch, two_pairs, 1)
    response = await two_pairs.complete(max_tokens=4)
    assert response.json()["choices"][0]["text"] == two_pairs.expected(4)
    first, second = choices
    assert first.chosen.decode != second.chosen.decode


async def test_a_suspect_whose_worker_leaves_before_it_is_asked_has_another_turn(
    nats_url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(components, "Probation", lambda: Probation(turn_seconds=1e6))
    async with cluster(nats_url, folder, limits=LIMITS) as made, AsyncExitStack() as stack:
        choices = leaves_when_chosen(monkeypatch, made, 2)
        made.decodes[0].suffers(Die(FaultStage.TOKEN, offset=2))
        asking = asyncio.create_task(made.complete(SENTENCE, max_tokens=4))
        await until(lambda: made.decodes[0].dead.is_set())
        second = FakeDecode(made.script)
        await stack.enter_async_context(living(second, made.bus, made.subjects))
        async with asyncio.timeout(60):
            assert (await asking).json()["choices"][0]["text"] == made.expected(4)
        assert len(choices) == 3


async def test_a_decode_worker_that_comes_back_has_one_stream_as_before(
    one_pair: RouterCluster,
) -> None:
    (decode,), fleet = one_pair.decodes, one_pair.fleet
    name = WorkerName(decode.worker_id, decode.epoch)
    for _ in range(3):
        one_pair.router.components.listener.apply(fleet.lose(name, "silent"))
        await one_pair.until_joined(decode)
    response = await one_pair.complete(max_tokens=4)
    assert response.json()["choices"][0]["text"] == one_pair.expected(4)


async def test_a_worker_that_leaves_without_its_snapshot_is_not_asked_any_more(
    one_pair: RouterCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_listener, "SNAPSHOT_SECONDS", 0.1)
    monkeypatch.setattr(fleet_listener, "SNAPSHOT_RETRY_SECONDS", 0.05)
    silent = FakePrefill(one_pair.script)
    monkeypatch.setattr(silent, "_snapshot", never)
    async with living(silent, one_pair.bus, one_pair.subjects):
        await one_pair.until_joined(silent)
        name = WorkerName(silent.worker_id, silent.epoch)
        assert name in one_pair.router.components.listener._asking
    one_pair.router.components.listener.apply(one_pair.fleet.lose(name, "silent"))


async def never(_: object) -> bytes:
    await asyncio.Event().wait()
    raise AssertionError("it is never set")
