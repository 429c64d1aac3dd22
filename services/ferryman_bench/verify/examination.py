"""The run: which way is tried next, what its answers are compared with, and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ferryman_bench.endpoint.client import AskedEngine
from ferryman_bench.endpoint.inquiry import Delivery, Inquiry
from ferryman_bench.endpoint.reply import Reply
from ferryman_bench.verify.cold_source import ColdSource
from ferryman_bench.verify.wager import RoundingFloor
from ferryman_bench.verify.way_record import (
    COLD_REPLIES,
    WayProbe,
    WayRecord,
    WayResult,
)
from ferryman_bench.verify.ways import REUSE_WAYS, STRANGERS, Material, Play, WarmReply

MOST_REQUESTS = 2_000
FALSE_RATE = 0.001
LEAST_ROUNDING, MOST_ROUNDING = 0.1, 1.0
# Further probes of a way that looks suspicious, in each round.
_MORE_PROBES = 3


@dataclass(slots=True)
class CountedEngine:
    """Adds `fields` to all that is asked, and counts it in `counter`."""

    asker: AskedEngine
    counter: list[int]
    fields: Mapping[str, Any] = field(default_factory=dict)

    async def ask(self, inquiry: Inquiry, delivery: Delivery = Delivery.WHOLE) -> Reply:
        self.counter[0] += 1
        return await self.asker.ask(inquiry.with_fields(self.fields), delivery)

    def with_fields(self, fields: Mapping[str, Any]) -> CountedEngine:
        return CountedEngine(self.asker, self.counter, {**self.fields, **fields})


@dataclass(frozen=True, slots=True)
class ExaminationPlan:
    """The limits of a run. `rate` is the share of sound engines that may be accused.

    `fields` go with every request, such as those that ask for log probabilities.
    """

    max_requests: int = MOST_REQUESTS
    rate: float = FALSE_RATE
    least_rounding: float = LEAST_ROUNDING
    has_logprobs: bool = True
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExaminationReport:
    """The records of a run, one for each way."""

    records: tuple[WayRecord, ...]
    num_requests: int
    floor: float
    plan: ExaminationPlan

    def result(self, record: WayRecord) -> WayResult:
        return record.result(self.floor, rate=self.plan.rate, num_ways=len(self.records))

    @property
    def accused(self) -> list[WayRecord]:
        return [record for record in self.records if self.result(record) is WayResult.CHANGED]


class Examination:
    """Probes an engine, way after way, until `max_requests` are used or all ways are accused."""

    def __init__(
        self,
        asker: AskedEngine,
        material: Material,
        cold: ColdSource,
        *,
        plan: ExaminationPlan,
        ways: Mapping[str, Play] = REUSE_WAYS,
    ) -> None:
        self._counter = [0]
        self._asker = CountedEngine(asker, self._counter, plan.fields)
        self._material, self._cold, self._plan, self._ways = material, cold, plan, ways
        self._records = {name: WayRecord(name) for name in ways}
        self._floor = RoundingFloor(plan.least_rounding, max(plan.least_rounding, MOST_ROUNDING))

    async def run(self, progress: Callable[[int], object] = lambda _: None) -> ExaminationReport:
        """Calls `progress` with the number of requests after each batch."""
        dearest = 0
        while names := self._next_names():
            # A flush costs as much for one question as for all of a round.
            batches = [names] if self._cold.has_flush else [[name] for name in names]
            for batch in batches:
                if self._counter[0] + dearest > self._plan.max_requests:
                    return self.report()
                before = self._counter[0]
                await self._probe(batch)
                dearest = max(dearest, self._counter[0] - before)
                progress(self._counter[0])
        return self.report()

    def report(self) -> ExaminationReport:
        records = tuple(self._records.values())
        return ExaminationReport(records, self._counter[0], self._floor.nats, self._plan)

    def _next_names(self) -> list[str]:
        """One probe of each way that is not accused yet, and more of those that look suspicious."""
        open_records = [
            record
            for record in self._records.values()
            if not record.wager.has_won(self._plan.rate, len(self._ways))
        ]
        more = [record.name for record in open_records if record.num_suspect]
        return [*(record.name for record in open_records), *more * _MORE_PROBES]

    async def _probe(self, names: Sequence[str]) -> None:
        warm: list[tuple[WarmReply, Mapping[str, Any]]] = []
        for name in names:
            fields = self._cold.warm_fields()
            asker = self._asker.with_fields(fields)
            warm.append((await self._ways[name](asker, self._material), fields))
        colds = [list(reply.early[:COLD_REPLIES]) for reply, _ in warm]
        while any(len(answers) < COLD_REPLIES for answers in colds):
            await self._cold.flush(self._asker)
            for (reply, _), answers in zip(warm, colds, strict=True):
                if len(answers) < COLD_REPLIES:
                    asker = self._asker.with_fields(self._cold.cold_fields())
                    answers.append(await asker.ask(reply.question))
        for name, (reply, fields), answers in zip(names, warm, colds, strict=True):
            self._note(name, WayProbe(reply, fields, tuple(answers)))

    def _note(self, name: str, probe: WayProbe) -> None:
        """Judges by the floor as it was before this probe, so that the bet stays fair."""
        self._records[name] = self._records[name].after(
            probe, self._floor.nats, has_logprobs=self._plan.has_logprobs
        )
        self._floor = self._floor.after(probe.cold_nats)
        if name == STRANGERS:
            self._floor = self._floor.after(probe.nats)
