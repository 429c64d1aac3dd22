"""Jobs beside others, and their end."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from ferryman.runtime import background as background_module
from ferryman.runtime.background import Background


async def test_a_job_that_a_cancelled_one_starts_ends_too() -> None:
    begun: list[str] = []

    async def for_ever(name: str) -> None:
        begun.append(name)
        await asyncio.Event().wait()

    async with asyncio.timeout(60), Background() as background:

        async def starting_another() -> None:
            try:
                await for_ever("first")
            finally:
                background.start(for_ever("late"))

        background.start(starting_another())
        await asyncio.sleep(0)
    assert begun == ["first"]


async def test_a_job_that_lost_its_cancel_is_cancelled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(background_module, "CANCEL_AGAIN_SECONDS", 0.01)

    async def losing_one() -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    async with asyncio.timeout(60), Background() as background:
        background.start(losing_one())
        await asyncio.sleep(0)
    assert not len(background)
