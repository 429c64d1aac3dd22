"""Sends the sessions of a workload to an engine, and keeps a record of each turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from time import perf_counter
from typing import Any

from ferryman_bench.endpoint.client import AskedEngine, EndpointRefusal
from ferryman_bench.endpoint.inquiry import Delivery
from ferryman_bench.endpoint.reply import Reply
from ferryman_bench.serve.turn_record import TurnRecord, poisson_arrivals
from ferryman_bench.serve.workload import LoadSession, LoadTurn


@dataclass(frozen=True, slots=True)
class FullLoop:
    """`concurrent` sessions run at any time: the next begins when one ends."""

    concurrent: int

    def __str__(self) -> str:
        return f"{self.concurrent} at once"


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Sessions begin at random, `rate` a second, however busy the server is."""

    rate: float

    def __str__(self) -> str:
        return f"{self.rate:g} a second"


@dataclass(frozen=True, slots=True)
class TraceLoop:
    """Sessions begin when the trace says so."""

    def __str__(self) -> str:
        return "as recorded"


ArrivalLoop = FullLoop | OpenLoop | TraceLoop

Ends = Callable[[int], Mapping[str, Any]]
"""The fields by which a server lets an answer of so many tokens end, or not."""


def own_ends(_num_tokens: int) -> Mapping[str, Any]:
    """The model ends an answer."""
    return {}


def ignoring_ends(_num_tokens: int) -> Mapping[str, Any]:
    """llama.cpp draws no end then. Ferryman and vLLM draw one, and the answer goes on."""
    return {"ignore_eos": True}


def without_ends(num_tokens: int) -> Mapping[str, Any]:
    """Ferryman and vLLM draw no end before `min_tokens`; with `ignore_eos` beside it they would. An
    end has no text, so a client that counts pieces of text would see one gap for two tokens."""
    return {"min_tokens": num_tokens}


@dataclass(slots=True)
class LoadRun:
    """One run against one engine. `ends` gives fields for every request; `progress` is called after
    each turn."""

    engine: AskedEngine
    ends: Ends
    progress: Callable[[], object] = lambda: None
    records: list[TurnRecord] = field(default_factory=list)
    _began: float = 0.0

    async def run(
        self, sessions: Sequence[LoadSession], loop: ArrivalLoop, seed: int = 0
    ) -> list[TurnRecord]:
        """The records of all turns in the order of their end. A session ends at its first error."""
        self._began = perf_counter()
        numbered = list(enumerate(sessions))
        async with asyncio.TaskGroup() as group:
            if isinstance(loop, FullLoop):
                waiting = iter(numbered)
                for _ in range(loop.concurrent):
                    group.create_task(self._in_turn(waiting))
                return self.records
            times = _arrivals(sessions, loop, seed)
            for (number, session), seconds in zip(numbered, times, strict=True):
                group.create_task(self._at(seconds, number, session))
        return self.records

    async def _in_turn(self, waiting: Any) -> None:
        for number, session in waiting:
            await self._session(number, session)

    async def _at(self, seconds: float, number: int, session: LoadSession) -> None:
        await asyncio.sleep(max(0.0, seconds - self._now))
        await self._session(number, session)

    @property
    def _now(self) -> float:
        return perf_counter() - self._began

    async def _session(self, number: int, session: LoadSession) -> None:
        answers: tuple[str, ...] = ()
        for place, turn in enumerate(session.turns):
            inquiry = session.inquiry(place, answers).with_fields(self.ends(turn.max_tokens))
            sent = self._now
            try:
                reply = await self.engine.ask(inquiry, Delivery.STREAMED)
            except EndpointRefusal as error:
                self._keep(TurnRecord(number, place, sent, self._now, error=str(error)))
                return
            self._keep(_record(number, place, sent, turn, reply))
            answers += (reply.text,)

    def _keep(self, record: TurnRecord) -> None:
        self.records.append(record)
        self.progress()


def _arrivals(
    sessions: Sequence[LoadSession], loop: OpenLoop | TraceLoop, seed: int
) -> list[float]:
    if isinstance(loop, OpenLoop):
        return poisson_arrivals(Random(seed), loop.rate, len(sessions))
    return [session.arrival_seconds or 0.0 for session in sessions]


def _record(session: int, place: int, sent: float, turn: LoadTurn, reply: Reply) -> TurnRecord:
    usage = reply.usage
    return TurnRecord(
        session,
        place,
        sent,
        sent + reply.seconds,
        tuple(sent + seconds for seconds in reply.arrivals),
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.cached_tokens,
        _is_right(turn, reply),
    )


def _is_right(turn: LoadTurn, reply: Reply) -> bool | None:
    if turn.wants_call:
        return reply.num_calls > 0
    return turn.answer in reply.text if turn.answer else None
