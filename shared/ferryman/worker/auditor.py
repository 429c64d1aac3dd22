"""The auditor: compares what an audit computed again, and draws the consequences of a difference.

Wrong state has one of many causes, and the audit names none: a unit that was spoilt in memory, in a
tier or on the way, or a fault of this worker. So both are taken out. The chain that the request
stands on is dropped on the device and in every tier, and the worker reuses nothing cached until it
is started anew. It goes on serving, because what it computes whole is right or wrong as before.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from ferryman.engine.bit_comparison import UnitDifference, first_difference
from ferryman.handoff.lifecycle import AUDITED
from ferryman.runtime.lifecycle import Fact
from ferryman.schedule.events import AuditDone, AuditReady, AuditResult

if TYPE_CHECKING:
    from ferryman.worker.worker_app import WorkerContext

log = logging.getLogger(__name__)


class Auditor:
    """Takes the audits of one worker's schedule to their end."""

    def __init__(self, parts: WorkerContext) -> None:
        self._parts = parts
        self._audits = parts.metrics.counter(
            "audits_total", "requests that reused state, computed again, by result", ["result"]
        )
        for result in AuditResult:
            self._audits.labels(str(result))  # there from the start, so a first alarm is a change

    def on_event(self, event: AuditReady | AuditDone) -> None:
        """Takes an audit of the schedule; a comparison runs in a thread."""
        if isinstance(event, AuditDone):
            self._audits.labels(str(event.result)).inc()
        else:
            self._parts.background.start(self._compare(event))

    async def _compare(self, event: AuditReady) -> None:
        engine, audits = self._parts.engine, self._parts.engine.scheduler.audits
        try:
            difference = await asyncio.to_thread(
                first_difference, engine.manifest, engine.transfer, event.pairs
            )
        finally:
            # If its slots were needed meanwhile, others may have written to them.
            is_valid = audits.close(event.request_id)
            self._parts.wake.set()
        if not is_valid:
            return
        if difference is not None:
            self._quarantine(event, difference)
        result = AuditResult.EQUAL if difference is None else AuditResult.DIFFERENT
        self._audits.labels(str(result)).inc()
        self._say(event, result, {} if difference is None else _facts(difference))

    def _quarantine(self, event: AuditReady, difference: UnitDifference) -> None:
        scheduler = self._parts.engine.scheduler
        facts = " ".join(f"{name}={value}" for name, value in _facts(difference).items())
        log.error(
            "an audit found wrong state, nothing is reused here any more id=%s reuse=%s %s",
            event.request_id,
            ",".join(event.reuse),
            facts,
        )
        if event.first:
            scheduler.drop_chain(event.first)
            self._parts.host.chain_dropped(event.first)
        scheduler.quarantine()

    def _say(self, event: AuditReady, result: AuditResult, facts: dict[str, Fact]) -> None:
        request_id, _, attempt = event.request_id.rpartition(".")
        self._parts.lifecycle.publish(
            request_id,
            int(attempt),
            AUDITED,
            traceparent="",  # that of its earlier events
            result=str(result),
            position=event.position,
            reuse=list(event.reuse),
            **facts,
        )


def _facts(difference: UnitDifference) -> dict[str, Fact]:
    """The first unit that differs: its place, its origin, and the digests of both sides."""
    unit, section = difference.unit, difference.section
    return {
        "kind": str(unit.kind),
        "index": unit.index,
        "key": unit.key.hex(),
        "origin": unit.origin,
        "section": f"{section.name} of layer {section.layer}",
        "served": difference.served.hex(),
        "cold": difference.cold.hex(),
        "units": difference.num_units,
    }
