"""The offline engine with audits: each request that it answers may be computed again, and compared.

with audited(folder, Cell(...), share=1.0) as engine:
    engine.generate(prompts, sampling)
    assert engine.audits.equal and not engine.audits.differences
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from tests.engine.host_fed import Cell, PutsAway, engine_of

from ferryman.engine.bit_comparison import UnitDifference, first_difference
from ferryman.schedule.audit.budget import AuditBudget
from ferryman.schedule.events import AuditDone, AuditReady, AuditResult, Event


@dataclass
class AuditCounts:
    """What audits found: results by name, ways of reuse that were compared, and differences."""

    results: Counter[str] = field(default_factory=Counter)
    reuse: Counter[str] = field(default_factory=Counter)
    differences: list[UnitDifference] = field(default_factory=list)


class AuditedEngine(PutsAway):
    """Runs the audits of a call to their end before it returns."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.audits = AuditCounts()

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
        if isinstance(event, AuditReady):
            self._compare(event)
        elif isinstance(event, AuditDone):
            self.audits.results[event.result] += 1
        super()._apply(event, answers)

    def _compare(self, event: AuditReady) -> None:
        engine, counts = self._engine, self.audits
        difference = first_difference(engine.manifest, engine.transfer, event.pairs)
        assert engine.scheduler.audits.close(event.request_id)
        counts.reuse.update(event.reuse)
        if difference is None:
            counts.results[AuditResult.EQUAL] += 1
        else:
            counts.results[AuditResult.DIFFERENT] += 1
            counts.differences.append(difference)


def audited(folder: Path, cell: Cell, share: float = 1.0) -> AuditedEngine:
    engine = engine_of(AuditedEngine, folder, cell)
    engine.audit(share)
    return engine
