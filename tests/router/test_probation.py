"""Turns of suspects: one at a time, in their order, until a turn ends by itself."""

from __future__ import annotations

import asyncio

import pytest
from tests.skipped_time import skipped_time

from ferryman_router.request.context import Probation


async def entered(probation: Probation, *names: str) -> tuple[list[str], list[asyncio.Task[None]]]:
    """The suspects whose turn has come, in order, and their waits."""
    come: list[str] = []

    async def enter(name: str) -> None:
        await probation.enter(name)
        come.append(name)

    waits = [asyncio.create_task(enter(name)) for name in names]
    await settle()
    return come, waits


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_suspects_are_tried_one_at_a_time_in_their_order() -> None:
    probation = Probation()
    come, _ = await entered(probation, "a", "b", "c")
    assert come == ["a"]
    probation.leave("b")  # it has no turn to end
    await settle()
    assert come == ["a"]
    for name, expected in (("a", ["a", "b"]), ("b", ["a", "b", "c"])):
        probation.leave(name)
        probation.leave(name)
        await settle()
        assert come == expected


async def test_a_turn_ends_by_itself_but_not_while_there_is_no_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    time = skipped_time(monkeypatch)
    probation = Probation(turn_seconds=2.0)
    come, _ = await entered(probation, "a", "b")
    await time.skip(100.0)
    assert come == ["a"], "no worker has it yet"
    probation.sent("a")
    await time.skip(1.9)
    assert come == ["a"]
    await time.skip(0.2)
    assert come == ["a", "b"]
    probation.leave("a")
    probation.sent("b")
    await time.skip(1.9)
    await entered(probation, "c")
    assert come == ["a", "b"], "the turn of b is its own"


async def test_the_end_of_one_turn_ends_no_later_one_of_the_same_suspect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    time = skipped_time(monkeypatch)
    probation = Probation(turn_seconds=2.0)
    await entered(probation, "a")
    probation.sent("a")
    probation.leave("a")
    await entered(probation, "a")  # it was turned away, and waits for a worker
    come, _ = await entered(probation, "b")
    await time.skip(100.0)
    assert come == []
    probation.leave("a")
    await settle()
    assert come == ["b"]


async def test_a_suspect_whose_client_leaves_blocks_no_other() -> None:
    probation = Probation()
    come, (_, waiting, _) = await entered(probation, "a", "b", "c")
    waiting.cancel()
    probation.leave("a")
    await settle()
    assert come == ["a", "c"]
