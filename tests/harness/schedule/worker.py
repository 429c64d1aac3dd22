"""A scheduler over stamped slots, whose steps run when the test says."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import TypedDict, TypeVar, Unpack

import numpy as np
from tests.doubles.fake_engine import FakeEngine, no_delay
from tests.doubles.stamps import fake_manifest, fake_tokens
from tests.harness.schedule.drafts import VOCAB, lying_draft_model

from ferryman.cache.capacity import Concurrency, tracking_slots
from ferryman.cache.keys import page_keys, root_key
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.resume import EMPTY_HOST, HostView, ResumeCosts
from ferryman.cache.slots import Demand
from ferryman.schedule.batch import StepPlan
from ferryman.schedule.drafting import NO_DRAFTS, Drafting
from ferryman.schedule.events import (
    AuditDone,
    AuditReady,
    Cached,
    ChainDropped,
    Drawn,
    Event,
    Finished,
    LoadCorrupt,
    RequestFailed,
    Retracted,
    SequenceAdmitted,
    SequenceDetached,
    SequenceHeld,
)
from ferryman.schedule.limits import PREFILL_FIRST, SchedulerLimits, StepOrder
from ferryman.schedule.request import Request, SamplingParams
from ferryman.schedule.scheduler import Scheduler
from ferryman.schedule.sequence import Goal

E = TypeVar(
    "E",
    AuditDone,
    AuditReady,
    SequenceAdmitted,
    SequenceDetached,
    Cached,
    ChainDropped,
    Drawn,
    Finished,
    SequenceHeld,
    LoadCorrupt,
    RequestFailed,
    Retracted,
)

PAGE = 4
MAX_LEN = 64
HYBRID = fake_manifest(PAGE)
ALL_KINDS = fake_manifest(PAGE, kinds=list(Kind), window_len=6)
ATTENTION = fake_manifest(PAGE, kinds=[Kind.FULL, Kind.WINDOW], window_len=6)
MANIFESTS = {"hybrid": HYBRID, "all kinds": ALL_KINDS, "attention": ATTENTION}
SIZES = {Kind.FULL: 40, Kind.WINDOW: 40, Kind.RECURRENT: 24}
"""Room for a few requests. Of any sizes a worker takes those of its kinds."""


class ScheduleOptions(TypedDict, total=False):
    """The options of a worker beside its manifest and the sizes of its pools."""

    overlap: bool
    prefix_cache: bool
    max_running: int
    max_prealloc: int
    max_waiting: int
    max_len: int
    chunk_tokens: int
    snapshot_grid: int
    drafting: Drafting
    order: StepOrder
    audit_share: float
    costs: ResumeCosts
    vocab_size: int
    pace: Callable[[StepPlan], None]


def request(
    manifest: StateManifest, request_id: str, token_ids: Sequence[int], max_tokens: int = 4
) -> Request:
    ids = np.array(token_ids, dtype="<u4")
    keys = page_keys(root_key(manifest), ids, manifest.page_size)
    return Request(request_id, ids, keys, SamplingParams(max_tokens=max_tokens, temperature=0.0))


def limits_of(manifest: StateManifest, sizes: Demand, options: ScheduleOptions) -> SchedulerLimits:
    overlap, prefix_cache = options.get("overlap", True), options.get("prefix_cache", True)
    drafting = options.get("drafting", NO_DRAFTS)
    tracking = tracking_slots(prefix_cache=prefix_cache, overlap=overlap)
    num_rows = options.get("max_running", 4)
    num_reserved = options.get("max_prealloc", 4)
    longest = min(MAX_LEN, sizes.get(Kind.FULL, MAX_LEN) * manifest.page_size)
    return SchedulerLimits(
        concurrency=Concurrency(num_rows, num_reserved, tracking, drafting.num_tokens),
        chunk_tokens=options.get("chunk_tokens", 8),
        max_len=options.get("max_len", longest),
        max_waiting=options.get("max_waiting", 100),
        steps_in_flight=2 if overlap else 1,
        prefix_cache=prefix_cache,
        snapshot_grid=options.get("snapshot_grid", 0),
        drafting=drafting,
        order=options.get("order", PREFILL_FIRST),
        audit_share=options.get("audit_share", 0.0),
    )


class ScheduledWorker:
    """Plans, runs and commits; steps wait in `queued` until they are run, in order."""

    def __init__(
        self,
        manifest: StateManifest,
        sizes: Demand = SIZES,
        **options: Unpack[ScheduleOptions],
    ) -> None:
        self.manifest = manifest
        self.sizes = {kind: sizes[kind] for kind in manifest.kinds}
        limits = limits_of(manifest, self.sizes, options)
        self.vocab_size = options.get("vocab_size", VOCAB)
        costs = options.get("costs", ResumeCosts(1.0, 0.0))
        self.scheduler = Scheduler(manifest, self.sizes, limits, costs, root_key(manifest))
        self.engine = FakeEngine(
            manifest,
            self.sizes,
            max_rows=limits.concurrency.rows,
            max_len=MAX_LEN + 4,
            vocab_size=self.vocab_size,
            pace=options.get("pace", no_delay),
            proposer=lying_draft_model,
        )
        self.queued: deque[StepPlan] = deque()
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.requests: dict[str, Request] = {}
        self.events: list[Event] = []
        self.now = 0.0

    def submit(self, asked: Request, goal: Goal = Goal.DECODE, host: HostView = EMPTY_HOST) -> None:
        self.scheduler.check(asked, goal)
        self.scheduler.submit(asked, goal, host)
        self.requests[asked.request_id] = asked

    def plan(self) -> bool:
        """Submits one more step if the scheduler has one."""
        self.now += 1
        plan = self.scheduler.plan(self.now)
        if plan is not None:
            self.engine.begin(plan)  # loads run at the earliest moment there is
            self.queued.append(plan)
        self.collect()
        return plan is not None

    def run_oldest(self) -> bool:
        """Runs and commits the step that has waited longest."""
        if not self.queued:
            return False
        self.now += 1
        plan = self.queued.popleft()
        self.scheduler.commit(plan, self.engine.run(plan), self.now)
        self.collect()
        return True

    def collect(self) -> None:
        for event in self.scheduler.take_events():
            self.events.append(event)
            if isinstance(event, Drawn):
                tokens = self.tokens[event.request_id]
                assert event.offset == len(tokens), "tokens come once and in order"
                tokens.append(event.sampled.token_id)
        self.scheduler.check_integrity()

    def drain(self, limit: int = 3000) -> None:
        """Runs until nothing is left to do; a scheduler that stands still fails here."""
        for _ in range(limit):
            planned = self.plan()
            ran = self.run_oldest()
            if not (planned or ran):
                break
        assert not self.queued

    def expected(self, request_id: str) -> list[int]:
        asked = self.requests[request_id]
        return fake_tokens(asked.token_ids, asked.sampling.max_tokens, self.vocab_size)

    def seen(self, kind: type[E]) -> list[E]:
        """All events of one type so far, in order."""
        return [event for event in self.events if isinstance(event, kind)]
