"""Ways of an answer that another worker takes up in its middle, or that waits there for room."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

from tests.harness.cluster import Service
from tests.waiting import LOOK_SECONDS
from tools.bits.cluster.served_answer import ServedAnswer, Tried
from tools.bits.cluster.serving import AnswerStream, ServedCase, when
from tools.bits.compared_answer import NotTried
from tools.bits.models import Prompt

from ferryman.errors import NotFound
from ferryman.handoff.lifecycle import DECODE, PREFILL, LifecycleEntry
from ferryman.wire.nats.subjects import Subjects

FAR = 3
"""The tokens of each answer that a client has when its worker is struck."""


async def decode_killed(served: ServedCase) -> list[Tried]:
    """The next worker computes what was lost again, the drawn tokens as a prompt."""

    async def attempt(prompts: Sequence[Prompt]) -> list[Tried]:
        await served.staff(decode=1)
        (victim,) = served.cluster.of_role("decode")
        streams = served.begin(prompts)
        await _are_far(streams)
        struck = [stream.is_under_way for stream in streams]
        victim.kill()
        await asyncio.to_thread(served.cluster.start("decode").await_ready)
        results = await _judged(served, streams, was_recovered)
        return _in_middle(results, struck)

    await served.forget()
    return await served.until_taken(attempt)


async def drained(served: ServedCase) -> list[Tried]:
    """The worker with most of the answers hands them off, with their state, and ends."""

    async def attempt(prompts: Sequence[Prompt]) -> list[Tried]:
        await served.staff(decode=2)
        streams = served.begin(prompts)
        victim = await _busiest(served, streams)
        # A drain takes as long as a short answer, so it begins with the first token.
        await when(lambda: any(stream.num_come for stream in streams))
        victim.process.send_signal(signal.SIGTERM)
        results = await _judged(served, streams, was_moved)
        await asyncio.to_thread(victim.process.wait, 120)
        return results

    await served.forget()
    return await served.until_taken(attempt)


async def prefill_killed(served: ServedCase) -> list[Tried]:
    """With the first chunk of a prompt its worker is gone; the next one begins anew."""

    async def attempt(prompts: Sequence[Prompt]) -> list[Tried]:
        await served.staff(prefill=1)
        await served.forget_devices()
        (victim,) = served.cluster.of_role("prefill")
        chunks = f"{Subjects().root}.life.prefill.{victim.ready['worker_id']}.*.chunk"
        async with served.cluster.bus() as bus, bus.subscribed(chunks) as messages:
            streams = served.begin(prompts)
            await anext(messages)
            victim.kill()
        struck = [not stream.num_come for stream in streams]
        await asyncio.to_thread(served.cluster.start("prefill").await_ready)
        results = await _judged(served, streams, was_begun_twice)
        return _in_middle(results, struck)

    await served.forget()
    return await served.until_taken(attempt)


async def _are_far(streams: Sequence[AnswerStream]) -> None:
    await when(lambda: all(stream.num_come >= FAR for stream in streams))


async def _busiest(served: ServedCase, streams: Sequence[AnswerStream]) -> Service:
    """The decode worker to which most of them were routed."""
    chosen = Counter([await _decode_of(served, stream.request_id) for stream in streams])
    ((worker_id, _),) = chosen.most_common(1)
    workers = {str(each.ready["worker_id"]): each for each in served.cluster.of_role("decode")}
    return workers[worker_id]


async def _decode_of(served: ServedCase, request_id: str) -> str:
    while True:
        with suppress(NotFound):
            for route in await served.client.explain(request_id):
                return route.chosen.decode_worker_id
        await asyncio.sleep(LOOK_SECONDS / 10)


Judge = Callable[[list[LifecycleEntry]], str]
"""The reason why a log doesn't show what should have happened; empty if it does."""


async def _judged(served: ServedCase, streams: Sequence[AnswerStream], judge: Judge) -> list[Tried]:
    answers = await asyncio.gather(*(stream.end() for stream in streams))
    return [await _proven(served, answer, judge) for answer in answers]


async def _proven(served: ServedCase, answer: ServedAnswer, judge: Judge) -> Tried:
    reason = judge(await served.cluster.log_of(answer.request_id))
    return NotTried(reason) if reason else answer


def _in_middle(results: Sequence[Tried], struck: Sequence[bool]) -> list[Tried]:
    """The results of those that were struck."""
    missed = NotTried("its worker was not struck in its middle")
    return [each if is_so else missed for each, is_so in zip(results, struck, strict=True)]


def was_recovered(log: list[LifecycleEntry]) -> str:
    if not _named(log, "migrated"):
        return "no other worker took it up"
    return "" if _again(log, PREFILL) else "nothing was computed again"


def was_moved(log: list[LifecycleEntry]) -> str:
    sent = [event for event in _named(log, "handed_off") if event.role == DECODE]
    if not sent:
        return "its worker did not hand it off"
    return "it was computed again" if _again(log, PREFILL) else ""


def was_begun_twice(log: list[LifecycleEntry]) -> str:
    first = [event.name for event in log if event.role == PREFILL and event.attempt == 1]
    if "chunk" not in first or "handed_off" in first:
        return "it was not in the middle of its prompt"
    return "" if _again(log, PREFILL) else "nothing was computed again"


def _named(log: list[LifecycleEntry], name: str) -> list[LifecycleEntry]:
    return [event for event in log if event.name == name]


def _again(log: list[LifecycleEntry], role: str) -> list[LifecycleEntry]:
    """Events of a role in a later attempt than the first."""
    return [event for event in log if event.role == role and event.attempt > 1]
