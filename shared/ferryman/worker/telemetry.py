"""A worker's messages to the fleet: beats of its start, heartbeats, cache events with a sequence,
answers to orders."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.node import TreeChange
from ferryman.engine.engine import Engine
from ferryman.engine.stream import StepEngine
from ferryman.engine.warm_up import MostTokens, WarmUp
from ferryman.errors import QueueFull
from ferryman.model.weights.load_progress import LoadProgress, LoadStage
from ferryman.runtime.http_server import Endpoints, HttpAnswer, json_answer
from ferryman.runtime.logs import set_level
from ferryman.runtime.membership import Membership, Orders
from ferryman.runtime.metrics import CONTENT_TYPE, Metrics
from ferryman.schedule.step_sizes import StepSizes
from ferryman.wire.codec.caches import (
    CacheEvent,
    CacheSnapshot,
    cache_event_to_bytes,
    cache_snapshot_to_bytes,
)
from ferryman.wire.nats.heartbeat import Heartbeat, ServedState, StartBeat, StartPhase
from ferryman.worker.cache_metrics import SlotGauges, usage_of
from ferryman.worker.loop import Clock, StepTimings

log = logging.getLogger(__name__)

# A step in which no layer ends for longer than this counts as stuck: the worker stops its
# heartbeats, so routers give it up.
STUCK_SECONDS = 30.0
# A loop of a kind that no step had before is compiled within the step: on a busy machine that took
# two minutes, in which no layer ends.
COMPILE_SECONDS = 600.0
COMPILING = "ferryman_kernels.compiling"  # the log of loops whose compilation begins
# This many keys fit into a snapshot message of the bus.
MAX_SNAPSHOT_KEYS = 60_000
_PHASES = {LoadStage.FINGERPRINT: StartPhase.READING, LoadStage.WEIGHTS: StartPhase.LOADING}


class WorkerStart:
    """The phase of one start, and how far it is.

    The thread that loads writes it and the event loop reads it: a phase with its numbers is one
    value, so no beat mixes two.
    """

    def __init__(self, member: Membership, clock: Clock) -> None:
        self._member, self._clock = member, clock
        self._began = clock() - process_seconds()
        self._progress = (StartPhase.BEGINNING, 0, 0)
        self._num_loops = 0

    @property
    def seconds(self) -> float:
        """The time since the process began: its imports are a part of the start."""
        return self._clock() - self._began

    def on_load(self, progress: LoadProgress) -> None:
        """Bytes of the model were read."""
        self._progress = (_PHASES[progress.stage], progress.done_bytes, progress.total_bytes)

    def on_loop(self) -> None:
        """A loop is compiled; their number is not known before."""
        self._num_loops += 1
        self._progress = (StartPhase.COMPILING, self._num_loops, 0)

    def warming(self, warm: WarmUp) -> WarmUp:
        """The same first steps, reported as a phase."""

        def warm_reported(
            engine: StepEngine,
            manifest: StateManifest,
            sizes: StepSizes | None,
            most: MostTokens,
        ) -> None:
            self._progress = (StartPhase.WARMING_UP, 0, 0)
            warm(engine, manifest, sizes, most)

        return warm_reported

    def connects(self) -> None:
        """The engine is built; only the connections to others are missing."""
        self._progress = (StartPhase.CONNECTING, 0, 0)

    def beat(self) -> StartBeat:
        """The start as it is now."""
        member, (phase, done, total) = self._member, self._progress
        return StartBeat(
            member.role, member.worker_id, member.epoch, phase, done, total, self.seconds
        )


def process_seconds() -> float:
    """The age of this process; of a forked one, since the fork."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """The part of a worker's load that only its service knows. `handoff_seconds` are those after a
    prompt was computed, 0 before the first hand-off."""

    is_ready: bool
    num_running: int
    num_queued: int
    queue_tokens: int
    node: str
    planes: tuple[str, ...] = ("grpc",)
    handoff_seconds: float = 0.0


class CacheEvents:
    """Publishes the changes of the device cache, in order."""

    def __init__(self, member: Membership) -> None:
        self._member = member
        self._subject = member.subjects.cache(member.worker_id, member.epoch)
        self._sequence = 0

    def publish(self, changes: Iterable[TreeChange]) -> None:
        """One event for all changes of a step; a reader that misses one asks for a snapshot."""
        last = {(change.kind, key): change.is_stored for change in changes for key in change.keys}
        if not last:
            return
        self._sequence += 1
        event = CacheEvent(
            self._member.worker_id,
            self._member.epoch,
            self._sequence,
            removed=_by_kind(name for name, is_stored in last.items() if not is_stored),
            stored=_by_kind(name for name, is_stored in last.items() if is_stored),
        )
        try:
            self._member.bus.publish(self._subject, cache_event_to_bytes(event))
        except QueueFull:
            log.debug("cache event dropped sequence=%d", self._sequence)

    def snapshot(self, units: Iterable[tuple[Kind, PageKey]]) -> bytes:
        """Every unit in the cache, the shallowest pages first when not all of them fit."""
        held = list(units)
        kept = held[:MAX_SNAPSHOT_KEYS]
        snapshot = CacheSnapshot(
            self._member.worker_id,
            self._member.epoch,
            self._sequence,
            held=_by_kind(kept),
            num_omitted=len(held) - len(kept),
        )
        return cache_snapshot_to_bytes(snapshot)


def _by_kind(names: Iterable[tuple[Kind, PageKey]]) -> dict[Kind, tuple[PageKey, ...]]:
    by_kind: dict[Kind, list[PageKey]] = {}
    for kind, key in names:
        by_kind.setdefault(kind, []).append(key)
    return {kind: tuple(keys) for kind, keys in by_kind.items()}


class LoopCounter(logging.Handler):
    """Counts the loops whose compilation begins, while a `with` lasts."""

    def __init__(self) -> None:
        super().__init__()
        self.num_begun = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.num_begun += 1
        if (process_log := logging.getLogger()).isEnabledFor(record.levelno):
            process_log.handle(record)

    def __enter__(self) -> LoopCounter:
        logger = logging.getLogger(COMPILING)
        logger.setLevel(logging.INFO)  # it is heard whatever a worker writes to its own log
        logger.propagate = False  # which would take all that is heard
        logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger(COMPILING).removeHandler(self)


class StepProgress:
    """Whether layers and steps go on between heartbeats; an idle engine is not stuck, nor is one
    that compiles one of the `loops`."""

    def __init__(self, loops: LoopCounter) -> None:
        self._loops, self._num_loops = loops, loops.num_begun
        self._done = (-1, -1)
        self._moved_at, self._limit = 0.0, STUCK_SECONDS

    def is_stuck(self, engine: Engine, now: float) -> bool:
        """Whether a step is under way, and no layer or step has ended for STUCK_SECONDS, or for
        COMPILE_SECONDS after a loop began to be compiled."""
        done = engine.stream.steps_done, engine.layers_run.num_done
        if done != self._done or not engine.scheduler.num_in_flight:
            self._done, self._moved_at, self._limit = done, now, STUCK_SECONDS
        # Behind the look at layers: one may have ended, and the next begun with a loop.
        if self._num_loops != (num_loops := self._loops.num_begun):
            self._num_loops, self._moved_at, self._limit = num_loops, now, COMPILE_SECONDS
        return now - self._moved_at > self._limit


class Telemetry:
    """A worker's heartbeats, the changes of its cache after each step, and the orders it knows."""

    def __init__(
        self,
        engine: Engine,
        member: Membership,
        address: str,
        *,
        start_seconds: float,
        pace: StepTimings,
        load: Callable[[], WorkerLoad],
        wake: asyncio.Event,
        loops: LoopCounter,
        limit: str = "",
    ) -> None:
        """`limit` says why fewer requests run at once than were asked for."""
        self._engine, self._wake, self._limit = engine, wake, limit
        self._member, self._address, self._start_seconds = member, address, start_seconds
        self._pace, self._load = pace, load
        self._cache_events = CacheEvents(member)
        self._progress = StepProgress(loops)

    def publish_cache_changes(self, changes: Iterable[TreeChange]) -> None:
        """Publishes the changes of the cache, in order."""
        self._cache_events.publish(changes)

    def beat(self) -> Heartbeat | None:
        """The heartbeat; none while a step is stuck."""
        now = asyncio.get_running_loop().time()
        if self._progress.is_stuck(self._engine, now):
            log.warning("engine stuck steps=%d", self._engine.stream.steps_done)
            return None
        engine, load = self._engine, self._load()
        ledgers, drafts = engine.scheduler.ledgers(), engine.scheduler.statistics().drafts
        bytes_of = {layout.kind: layout.slot_bytes for layout in engine.manifest.layouts}
        return Heartbeat(
            role=self._member.role,
            worker_id=self._member.worker_id,
            epoch=self._member.epoch,
            address=self._address,
            is_ready=load.is_ready,
            state=ServedState.of(engine.manifest),
            max_len=engine.max_len,
            num_running=load.num_running,
            max_running=engine.scheduler.limits.concurrency.max_running,
            max_requests=engine.scheduler.limits.concurrency.rows,
            num_queued=load.num_queued,
            queue_tokens=load.queue_tokens,
            seconds_per_token=self._pace.seconds_per_token,
            step_seconds=self._pace.step_seconds,
            num_steps=engine.stream.steps_done,
            draft_steps=drafts.steps,
            drafted_tokens=drafts.drafted,
            accepted_tokens=drafts.accepted,
            free_slots={kind: ledger.free for kind, ledger in ledgers.items()},
            pool_slots={kind: ledger.total for kind, ledger in ledgers.items()},
            node=load.node,
            load_seconds_per_byte=self._pace.load_seconds_per_byte,
            page_bytes=sum(bytes_of.get(kind, 0) for kind in (Kind.FULL, Kind.WINDOW)),
            snapshot_bytes=bytes_of.get(Kind.RECURRENT, 0),
            start_seconds=self._start_seconds,
            planes=load.planes,
            handoff_seconds=load.handoff_seconds,
            is_quarantined=engine.scheduler.is_quarantined,
            limit=self._limit,
            cache_usage=usage_of(ledgers.get(Kind.FULL)),
        )

    def orders(self) -> Orders:
        """The orders that a worker knows, except the one to drain."""
        return {"snapshot": self._snapshot, "flush": self._flush, "log-level": _set_log_level}

    def _snapshot(self, _payload: bytes) -> bytes:
        return self._cache_events.snapshot(self._engine.scheduler.allocator.tree.units())

    def _flush(self, _payload: bytes) -> bytes:
        freed = self._engine.scheduler.flush()
        # no step may come for long, and routers still believe the old cache
        self._wake.set()
        return json.dumps({"freed": freed}).encode()


def _set_log_level(payload: bytes) -> bytes:
    set_level(payload.decode())
    return b'{"ok": true}'


def debug_endpoints(engine: Engine, metrics: Metrics) -> Endpoints:
    """`/metrics` and `/debug/ledger` of a worker."""
    metrics.watch("scheduler", engine.scheduler.statistics)
    metrics.registry.register(SlotGauges(metrics.prefix, engine.scheduler.ledgers))
    return {
        "/metrics": lambda: HttpAnswer(metrics.render(), CONTENT_TYPE),
        "/debug/ledger": lambda: json_answer(_ledgers(engine)),
    }


def _ledgers(engine: Engine) -> dict[str, object]:
    ledgers = engine.scheduler.ledgers()
    return {
        str(kind): {**asdict(ledger), "balances": ledger.balances}
        for kind, ledger in ledgers.items()
    }
