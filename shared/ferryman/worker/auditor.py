"""The auditor: compares what an audit computed again, and draws the consequences of a difference.

Wrong state has one of many causes, and the audit names none: a unit that was spoilt in memory, in a
tier or on the way, or a fault of this worker. So both are taken out. The chain that the request
stands on is dropped on the device and in the tiers of the node, and the worker reuses nothing
cached until it is started anew. It goes on serving: it may be the only one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ferryman.engine.bit_comparison import UnitDifference, first_difference
from ferryman.handoff.lifecycle import AUDITED
from ferryman.runtime.lifecycle import Fact
from ferryman.schedule.events import AuditDone, AuditOpened, AuditReady, AuditResult

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

    def on_event(self, event: AuditOpened | AuditReady | AuditDone) -> None:
        """Takes an audit of the schedule a step further; work that takes long runs in a thread."""
        match event:
            case AuditOpened():
                self._parts.background.start(self._prepare(event))
            case AuditReady():
                self._parts.background.start(self._compare(event))
            case AuditDone(result=result):
                self._audits.labels(str(result)).inc()

    async def _prepare(self, event: AuditOpened) -> None:
        engine = self._parts.engine
        await asyncio.to_thread(engine.prepare_ahead, event.fresh)
        engine.scheduler.audits.prepared(event.request_id)
        self._parts.wake.set()

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
        facts = _facts(event, difference)
        if facts:
            self._quarantine(event, facts)
        result = AuditResult.DIFFERENT if facts else AuditResult.EQUAL
        self._audits.labels(str(result)).inc()
        self._say(event, result, facts)

    def _quarantine(self, event: AuditReady, facts: Mapping[str, Fact]) -> None:
        scheduler = self._parts.engine.scheduler
        log.error(
            "an audit found wrong state, nothing is reused here any more id=%s reuse=%s %s",
            event.request_id,
            ",".join(event.reuse),
            " ".join(f"{name}={value}" for name, value in facts.items()),
        )
        if event.first:
            scheduler.drop_chain(event.first)
            self._parts.host.chain_dropped(event.first)
        scheduler.quarantine()

    def _say(self, event: AuditReady, result: AuditResult, facts: Mapping[str, Fact]) -> None:
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


def _facts(event: AuditReady, difference: UnitDifference | None) -> Mapping[str, Fact]:
    """The first unit that differs: its place, its origin, and the digests of both sides; or the
    first token. Empty if all is equal."""
    if difference is None:
        return {} if event.wrong_token is None else {"kind": "token", "index": event.wrong_token}
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
