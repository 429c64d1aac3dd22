"""Rows 4, 35 and 47 over any schedule: loads and stores beside the forward stream, in order.

A worker whose every plan, load, commit, free and store is written down; the sanitizer then asks of
each two uses of a slot whether an edge orders them. Nothing here depends on timing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.doubles.fake_engine import WrongStamp
from tests.doubles.sanitizer import Operation, Recorder
from tests.doubles.step_recorder import SCHEDULER, StepRecorder
from tests.harness.schedule import (
    HYBRID,
    MANIFESTS,
    PAGE,
    STEMS,
    CountingPool,
    Host,
    WatchedWorker,
    current,
    host_of,
    request,
)

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.slots import Demand, Holder, Role, SlotHandle
from ferryman.schedule import slot_allocator
from ferryman.schedule.batch import StepPlan
from ferryman.schedule.events import Cached
from ferryman.schedule.slot_allocator import SlotAllocator

STORES = "stores"


class TellingPool(CountingPool):
    """Reports each slot that became free to a callback."""

    def __init__(self, kind: Kind, num_slots: int, freed: Callable[[SlotHandle], None]) -> None:
        super().__init__(kind, num_slots)
        self._tell = freed

    def release(self, handle: SlotHandle, holder: Holder) -> bool:
        is_free = super().release(handle, holder)
        if is_free:
            self._tell(handle)
        return is_free


class RecordedWorker(WatchedWorker):
    """Writes down what its three streams do. Stores begin when a prefix is cached, and end late."""

    def __init__(self, manifest: StateManifest, sizes: Demand, *, overlap: bool = True) -> None:
        super().__init__(manifest, sizes, overlap=overlap)
        self.recorder = Recorder()
        self.steps = StepRecorder(self.recorder, self.handle_of, page_size=PAGE)
        pools = self.scheduler.allocator.pools.by_kind
        for kind, pool in pools.items():
            telling = TellingPool(kind, pool.num_slots, lambda slot: self.steps.freed([slot]))
            self.pools[kind] = pools[kind] = telling
        self.stores: deque[tuple[Holder, list[SlotHandle]]] = deque()
        self.num_loads = self.num_stores = 0
        self._num_stored = 0

    def handle_of(self, kind: Kind, slot: int) -> SlotHandle:
        return current(self.pools[kind], slot)

    def plan(self) -> bool:
        before = len(self.queued)
        planned = super().plan()
        for plan in list(self.queued)[before:]:
            self.steps.planned(plan)
            self.num_loads += len(plan.ops.loads)
        self.begin_stores()
        return planned

    def run_oldest(self) -> bool:
        if self.queued:
            self.steps.committed(self.queued[0].step_id)
        ran = super().run_oldest()
        self.begin_stores()
        return ran

    def begin_stores(self) -> None:
        """Write-through: all of a cached chain, leased to the copy."""
        for event in self.seen(Cached)[self._num_stored :]:
            units = self.scheduler.chain_units(event.keys)
            if handles := [unit.handle for unit in units]:
                self.begin_store(handles)
        self._num_stored = len(self.seen(Cached))

    def begin_store(self, handles: list[SlotHandle]) -> None:
        holder = Holder(Role.STORE, f"store {self.num_stores}")
        self.num_stores += 1
        self.scheduler.lease(handles, holder)
        self.recorder.add(Operation(SCHEDULER, f"start {holder}", records=(f"start {holder}",)))
        self.stores.append((holder, handles))

    def end_store(self) -> None:
        """The oldest store reads its slots now, and gives them back."""
        if not self.stores:
            return
        holder, handles = self.stores.popleft()
        begins, ends = f"start {holder}", f"end {holder}"
        reads = tuple(handles)
        self.recorder.add(
            Operation(STORES, f"{holder}", reads, waits=(begins,), records=(ends,)),
            Operation(SCHEDULER, ends, waits=(ends,)),
        )
        self.scheduler.release(handles, holder)


PROMPTS = st.builds(
    lambda stem, tail: [*stem, *tail],
    st.sampled_from(STEMS),
    st.lists(st.integers(0, 2), max_size=9),
)
ARRIVALS = st.tuples(
    st.just("arrive"), PROMPTS, st.integers(1, 9), st.sampled_from(["no", "host", "corrupt"])
)
STEPS = st.tuples(st.sampled_from(["plan", "run", "both", "store", "cancel"]), st.integers(1, 9))
SCRIPTS = st.lists(st.one_of(ARRIVALS, STEPS), max_size=25)


def play(worker: RecordedWorker, host: Host, script: list[tuple[object, ...]]) -> set[str]:
    """Runs a script, then the worker until it is idle; returns the cancelled requests."""
    worker.engine.host_tier.attach(memoryview(bytes(host.arena)))
    cancelled: set[str] = set()
    for line in script:
        match line:
            case ("arrive", list(prompt), int(max_tokens), str(how)):
                asked = request(worker.manifest, f"r{len(worker.requests)}", prompt, max_tokens)
                worker.submit(asked, host=host.view(asked.keys, how))
            case ("cancel", int(pick)):
                request_id = f"r{pick % max(1, len(worker.requests))}"
                if worker.scheduler.cancel(request_id, worker.now):
                    cancelled.add(request_id)
                worker.collect()
            case (str(step), int(times)):
                for _ in range(times):
                    advance(worker, step)
    worker.drain()
    while worker.stores:  # what they hold, others may be waiting for
        worker.end_store()
        worker.drain()
    return cancelled


def advance(worker: RecordedWorker, step: str) -> None:
    if step == "store":
        worker.end_store()
    if step in ("plan", "both"):
        worker.plan()
    if step in ("run", "both"):
        worker.run_oldest()


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(MANIFESTS)),
    overlap=st.booleans(),
    full=st.integers(10, 24),
    script=SCRIPTS,
)
def test_rows_4_35_47_every_two_uses_of_a_slot_are_ordered_by_an_edge(
    name: str, overlap: bool, full: int, script: list[tuple[object, ...]]
) -> None:
    """Loads begin when a step is submitted: by then no other operation uses their slots."""
    manifest = MANIFESTS[name]
    sizes = {Kind.FULL: full, Kind.WINDOW: 26, Kind.RECURRENT: 9}
    worker = RecordedWorker(manifest, sizes, overlap=overlap)
    cancelled = play(worker, host_of(name), script)
    assert [str(finding) for finding in worker.recorder.findings()] == []
    for request_id in set(worker.requests) - cancelled:
        assert worker.tokens[request_id] == worker.expected(request_id)


# The same net over planted defects.

SMALL = {Kind.FULL: 7, Kind.RECURRENT: 9}


def busy(worker: RecordedWorker) -> None:
    """Small pools, prompts that come from the host, and one that gives its slots back midway."""
    host = host_of("hybrid")
    script: list[tuple[object, ...]] = [
        ("arrive", [0] * 14, 9, "no"),
        ("both", 2),
        ("store", 9),
        ("plan", 1),
        ("cancel", 0),
        ("arrive", [*STEMS[1], 2], 3, "host"),
        ("plan", 1),
        ("both", 3),
    ]
    play(worker, host, script)


def recorded() -> RecordedWorker:
    return RecordedWorker(HYBRID, SMALL)


def test_what_the_planted_defects_are_planted_in_loads_stores_and_is_clean() -> None:
    worker = recorded()
    busy(worker)
    assert worker.num_loads
    assert worker.num_stores
    assert worker.recorder.findings() == ()


@contextmanager
def slots_that_come_back_at_once() -> Iterator[None]:
    """The planted defect: a request's slots are free although steps in flight name them."""
    with pytest.MonkeyPatch.context() as patch:

        def give_back_now(self: SlotAllocator, *what: object, **more: object) -> None:
            original = self._submitted
            self._submitted = self._committed
            retire(self, *what, **more)  # type: ignore[arg-type]
            self._submitted = original

        retire = slot_allocator.SlotAllocator.retire
        patch.setattr(slot_allocator.SlotAllocator, "retire", give_back_now)
        yield


class Unwatched(RecordedWorker):
    """Only the sanitizer looks."""

    def collect(self) -> None:
        for event in self.scheduler.take_events():
            self.events.append(event)

    def _check_initialisers(self, plan: StepPlan) -> None:
        """Not here."""


def test_a_load_into_slots_that_came_back_too_early_is_named_and_seen() -> None:
    """A load runs when its step is submitted; the step in front reads the page after that."""
    worker = Unwatched(HYBRID, SMALL)
    with (
        slots_that_come_back_at_once(),
        pytest.raises(WrongStamp, match="r0: full slot 2 does not hold"),
    ):
        busy(worker)
    assert ("forward of r0 of step 3", "free") in {
        (finding.first.name, finding.second.name) for finding in worker.recorder.findings()
    }


class LeaselessStores(RecordedWorker):
    """The planted defect: a copy to the host that holds no lease on its slots."""

    def begin_store(self, handles: list[SlotHandle]) -> None:
        self.stores.append((Holder(Role.STORE, "unknown"), handles))

    def end_store(self) -> None:
        if self.stores:
            _, handles = self.stores.popleft()
            self.recorder.add(Operation(STORES, "store", tuple(handles)))


def test_a_store_that_holds_no_lease_is_named() -> None:
    """Rows 1 and 47."""
    worker = LeaselessStores(HYBRID, SMALL)
    busy(worker)
    assert {f.second.stream for f in worker.recorder.findings()} >= {STORES}
