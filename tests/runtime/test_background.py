"""Jobs beside others, and their end."""

from __future__ import annotations

import asyncio

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
