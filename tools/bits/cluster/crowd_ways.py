"""Ways of many answers at once: in one batch, and where a worker's pages don't suffice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from tools.bits.cluster.served_answer import ServedAnswer, Tried
from tools.bits.cluster.serving import AnswerStream, ServedCase, when
from tools.bits.cluster.shapes import NUM_COMPANIONS
from tools.bits.compared_answer import NotTried
from tools.bits.models import Prompt
from tools.bits.ways import companions

EXTRA_TOKENS = 256
"""Answers beside are so much longer, so that they are under way all the time."""


async def batched(size: int, served: ServedCase) -> list[Tried]:
    """Other prompts fill the batch."""

    async def attempt(prompts: Sequence[Prompt]) -> list[Tried]:
        groups = [prompts[first : first + size] for first in range(0, len(prompts), size)]
        return [tried for group in groups for tried in await _in_batch(served, group, size)]

    await served.forget()
    return await served.until_taken(attempt)


async def _in_batch(served: ServedCase, group: Sequence[Prompt], size: int) -> list[Tried]:
    async with _beside(served, size - len(group)) as others:
        streams = served.begin(group)
        is_full = await _are_all_under_way(streams, others)
        answers = [await stream.end() for stream in streams]
    missed = NotTried(f"fewer than {size} were under way at once")
    return [answer if is_full else missed for answer in answers]


async def _are_all_under_way(
    streams: Sequence[AnswerStream], others: Sequence[AnswerStream]
) -> bool:
    """Whether all were at one moment."""

    def are_all() -> bool:
        return all(stream.is_under_way for stream in (*streams, *others))

    await when(lambda: are_all() or any(stream.reading.done() for stream in streams))
    return are_all()


async def retracted(served: ServedCase) -> list[Tried]:
    """Others take the pages that are left; the youngest is pushed back, and goes on later."""

    async def attempt(prompts: Sequence[Prompt]) -> list[Tried]:
        answers: list[list[ServedAnswer]] = []
        async with _beside(served, NUM_COMPANIONS) as others:
            # Some of the last ones are under way when the pages run out.
            while not answers or all(stream.is_under_way for stream in others):
                answers.append(await served.ask(prompts))
        return [await _first_retracted(served, tries) for tries in zip(*answers, strict=True)]

    await served.forget()
    return await served.until_taken(attempt)


async def _first_retracted(served: ServedCase, tries: Sequence[ServedAnswer]) -> Tried:
    for answer in tries:
        names = {event.name for event in await served.cluster.log_of(answer.request_id)}
        if {"retracted", "resumed"} <= names:
            return answer
    return NotTried(f"it was retracted in none of {len(tries)} tries")


@asynccontextmanager
async def _beside(served: ServedCase, number: int) -> AsyncIterator[list[AnswerStream]]:
    """Longer answers that are under way; given up at the end."""
    prompts = companions(served.model.prompts, number)
    streams = served.begin(prompts, served.num_tokens + EXTRA_TOKENS)
    await when(lambda: all(stream.num_come for stream in streams))
    try:
        yield streams
    finally:
        for stream in streams:
            stream.reading.cancel()
        await asyncio.gather(*(stream.reading for stream in streams), return_exceptions=True)
