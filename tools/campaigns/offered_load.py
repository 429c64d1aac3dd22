"""Callers of one kind: those that ask again as soon as they are answered, and those that come by
chance, whatever became of the ones before. Each outcome is noted, and a phase's are counted."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from tests.harness.cluster import Generated, generate

from ferryman.client import Client
from ferryman.errors import DeadlineExceeded, Exhausted, FerrymanError
from ferryman.schedule.request import SamplingParams

WHOLE = "whole"
LATELY_SECONDS = 2.0


@dataclass(frozen=True)
class OfferedLoad:
    """The request that every caller sends."""

    prompt_len: int
    max_tokens: int
    deadline_seconds: float

    def prompt(self, rng: random.Random) -> list[int]:
        return [rng.randrange(3, 120) for _ in range(self.prompt_len)]

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True)
class LoadOutcome:
    """The end of one request, in seconds since the phase began; `kind` is "whole" if it was so in
    time, or else an error."""

    arrived: float
    seconds: float
    kind: str
    is_refused: bool = False
    retry_after_seconds: float = 0.0


@dataclass(frozen=True)
class LoadPhase:
    """The results of the requests that arrived in one phase. Offered load and goodput are requests
    a second; `retry_after` are the least, the median and the longest time to come back."""

    name: str
    offered: float
    goodput: float
    kinds: dict[str, int]
    median_seconds: float
    latest_end: float
    worst_refusal: float
    untyped_refusals: int
    retry_after: tuple[float, float, float]

    @classmethod
    def of(
        cls, name: str, window: tuple[float, float], outcomes: Sequence[LoadOutcome]
    ) -> LoadPhase:
        """Counts the good answers that ended in the window: neither those from before the load was
        steady, nor those of a queue that is served when nobody comes any more."""
        begin, end = window
        refused = [one for one in outcomes if one.is_refused]
        good = sorted(
            one.seconds
            for one in outcomes
            if one.kind == WHOLE and begin <= one.arrived + one.seconds < end
        )
        times = sorted(one.retry_after_seconds for one in refused) or [0.0]
        return cls(
            name,
            round(sum(begin <= one.arrived < end for one in outcomes) / (end - begin), 2),
            round(len(good) / (end - begin), 2),
            dict(Counter(one.kind for one in outcomes)),
            round(good[len(good) // 2], 2) if good else 0.0,
            round(max((one.seconds for one in outcomes), default=0.0), 2),
            round(max((one.seconds for one in refused), default=0.0), 2),
            sum(not one.retry_after_seconds for one in refused),
            (round(times[0], 1), round(times[len(times) // 2], 1), round(times[-1], 1)),
        )


async def ask(client: Client, load: OfferedLoad, rng: random.Random, began: float) -> LoadOutcome:
    at = time.monotonic()
    kind, is_refused, retry_after = WHOLE, False, 0.0
    deadline = load.deadline_seconds
    try:
        await generate(client, load.prompt(rng), load.sampling, deadline_seconds=deadline)
    except Exhausted as error:
        # The message alone tells a refusal at the door from one when its turn had come.
        kind = f"{error.reason} at its turn" if "any more" in str(error) else error.reason
        is_refused, retry_after = True, error.retry_after_seconds
    except DeadlineExceeded:
        kind = "deadline"
    except FerrymanError as error:
        kind = error.reason
    if kind == WHOLE and time.monotonic() - at > deadline:
        kind = "late"
    return LoadOutcome(at - began, time.monotonic() - at, kind, is_refused, retry_after)


class ClosedLoop:
    """Callers that send the next request at once, and have all the time that they need: what a
    cluster can do, not what it lets in. Answers are counted by their tokens."""

    def __init__(self, client: Client, load: OfferedLoad, num_callers: int) -> None:
        self._client, self._load, self._num_callers = client, load, num_callers
        self._num_tokens = 0
        self._under_way: dict[int, Generated] = {}
        self._seen: deque[tuple[float, float]] = deque([(time.monotonic(), 0.0)])

    @property
    def num_answers(self) -> float:
        under_way = sum(len(answer.token_ids) for answer in self._under_way.values())
        return (self._num_tokens + under_way) / self._load.max_tokens

    def rate(self) -> float:
        """Answers a second, lately; at least one in two seconds."""
        now, num_answers = time.monotonic(), self.num_answers
        self._seen.append((now, num_answers))
        while len(self._seen) > 2 and self._seen[1][0] < now - LATELY_SECONDS:
            self._seen.popleft()
        since, before = self._seen[0]
        return max(0.5, (num_answers - before) / max(now - since, LATELY_SECONDS / 2))

    async def run(self) -> None:
        """Asks until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            for number in range(self._num_callers):
                group.create_task(self._caller(number))

    async def _caller(self, number: int) -> None:
        rng = random.Random(number)
        while True:
            answer = self._under_way[number] = Generated()
            with suppress(FerrymanError):  # one that is refused asks again
                prompt = self._load.prompt(rng)
                await generate(self._client, prompt, self._load.sampling, into=answer)
            self._num_tokens += len(answer.token_ids)
            self._under_way.pop(number)


async def open_loop(
    client: Client,
    load: OfferedLoad,
    rate: Callable[[], float],
    seconds: float,
    rng: random.Random,
) -> list[LoadOutcome]:
    """Random arrivals, `rate()` a second just then, which do not wait for earlier answers."""
    began = time.monotonic()
    asked: list[asyncio.Task[LoadOutcome]] = []
    at = 0.0
    async with asyncio.TaskGroup() as group:
        while (at := at + rng.expovariate(rate())) < seconds:
            await asyncio.sleep(max(0.0, began + at - time.monotonic()))
            asked.append(group.create_task(ask(client, load, random.Random(rng.random()), began)))
    return [task.result() for task in asked]


def recovery_seconds(outcomes: Sequence[LoadOutcome]) -> float:
    """When, after the overload, the last request arrived that was not answered in time."""
    return max((one.arrived for one in outcomes if one.kind != WHOLE), default=0.0)
