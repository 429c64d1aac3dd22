"""The offline engine with audits: a share of the requests that it answers is computed again.

with audited(folder, DTYPE, share=1.0) as engine:
    traffic = MixedTraffic(engine, seed=1)
    traffic.ask(30)
    assert engine.audits.results[EQUAL] and not engine.audits.differences
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from tests.engine.host_fed import PAGE_SIZE, HostFed, HostMemory

from ferryman.engine.bit_comparison import UnitDifference, first_difference
from ferryman.schedule.audit.budget import AuditBudget
from ferryman.schedule.events import AuditDone, AuditOpened, AuditReady, AuditResult, Drawn, Event
from ferryman.schedule.request import SamplingParams

VOCAB = range(3, 90)
MEGABYTE = 1 << 20


@dataclass
class AuditCounts:
    """The results of audits, the ways of reuse that were compared, and the differences: in units,
    or at the position of a token."""

    results: Counter[str] = field(default_factory=Counter)
    reuse: Counter[str] = field(default_factory=Counter)
    differences: list[UnitDifference | int] = field(default_factory=list)


class AuditedEngine(HostFed):
    """Runs the audits of a call to their end before it returns. A request that has drawn
    `retract_after` tokens is retracted, and resumes on the device."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.audits = AuditCounts()
        self.retract_after = 0

    def audit(self, share: float) -> None:
        """Audits this share from now on."""
        self._engine.scheduler.audits.budget = AuditBudget(share)

    def _run(self, answers: Mapping[str, Any]) -> None:
        super()._run(answers)
        pipeline, scheduler = self._engine.pipeline, self._engine.scheduler
        pipeline.fill(monotonic())
        while pipeline.flights:
            flight = pipeline.flights.popleft()
            scheduler.commit(flight.plan, flight.outcome.result(), monotonic())
            for event in scheduler.take_events():
                self._apply(event, answers)
            pipeline.fill(monotonic())

    def _apply(self, event: Event, answers: Any) -> None:
        super()._apply(event, answers)
        if isinstance(event, AuditOpened):
            self._engine.scheduler.audits.prepared(event.request_id)
        elif isinstance(event, AuditReady):
            self._compare(event)
        elif isinstance(event, AuditDone):
            self.audits.results[event.result] += 1
        elif isinstance(event, Drawn) and event.offset + 1 == self.retract_after:
            scheduler = self._engine.scheduler
            for sequence in list(scheduler.sequences.decoding):
                scheduler.retraction.retract(sequence, monotonic())

    def _compare(self, event: AuditReady) -> None:
        engine, counts = self._engine, self.audits
        difference = first_difference(engine.manifest, engine.transfer, event.pairs)
        assert engine.scheduler.audits.close(event.request_id)
        counts.reuse.update(event.reuse)
        different = [found for found in (difference, event.wrong_token) if found is not None]
        counts.results[AuditResult.DIFFERENT if different else AuditResult.EQUAL] += 1
        counts.differences += different[:1]


def audited(folder: Path, dtype: str, share: float = 1.0, **options: Any) -> AuditedEngine:
    engine = AuditedEngine(
        folder,
        dtype=dtype,
        page_size=PAGE_SIZE,
        chunk_tokens=48,
        max_running=4,
        memory_bytes=64 * MEGABYTE,
        num_threads=1,
        **options,
    )
    engine.audit(share)
    return engine


class MixedTraffic:
    """Conversations as they come: new prompts, known ones, next turns, loads from the host and
    retractions. Answers are a few tokens long."""

    def __init__(self, engine: AuditedEngine, seed: int) -> None:
        self._engine, self._rng = engine, random.Random(seed)
        self._histories: list[list[int]] = []
        self.num_requests = 0

    def ask(self, num_requests: int) -> None:
        """At least so many requests."""
        end = self.num_requests + num_requests
        while self.num_requests < end:
            self._ask_one()

    def _ask_one(self) -> None:
        rng = self._rng
        way = rng.choice(["new", "known", "known", "turn", "host", "retracted"])
        if way == "new" or len(self._histories) < 2:
            self._histories = [*self._histories[-5:], self._tokens(rng.randint(36, 70))]
        history = rng.choice(self._histories)
        if way == "host":
            self._bring_from_host(history)
        prompt = [*history, *self._tokens(rng.randint(1, 9))]
        num_tokens = rng.randint(18, 26)
        late = rng.randint(num_tokens // 2, num_tokens - 2)
        self._engine.retract_after = late if way == "retracted" else 0
        answer = self._answer(prompt, num_tokens)
        if way == "turn" and len(history) < 200:
            self._histories.append([*prompt, *answer])

    def _answer(self, prompt: list[int], num_tokens: int) -> tuple[int, ...]:
        self.num_requests += 1
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        return self._engine.generate([prompt], sampling)[0].token_ids

    def _bring_from_host(self, history: list[int]) -> None:
        """The history's state is in the host's memory, and nothing is on the device."""
        self._engine.attach(HostMemory())
        self._engine.retract_after = 0
        self._answer(history, 1)
        self._engine.write_through(history)
        self._engine.forget()

    def _tokens(self, number: int) -> list[int]:
        """A few tokens over and over, so that drafts from the text find something."""
        few = [self._rng.choice(VOCAB) for _ in range(7)]
        return [self._rng.choice(few) for _ in range(number)]
