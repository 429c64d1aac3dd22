"""Known ways to get scheduling wrong: the catalogue's rows 2, 4, 21, 22, 24, 38, 39 and 42."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.defects.watch import (
    ALL_KINDS,
    ATTENTION,
    HYBRID,
    MANIFESTS,
    PAGE,
    WatchedWorker,
    books,
    check_books,
    is_all_cached,
)
from tests.schedule.cluster import FakeWorker, request

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.resume import EMPTY_HOST, HostView
from ferryman.cache.slots import Holder, Role
from ferryman.cache.units import HostUnit
from ferryman.engine.transfer import digest_of
from ferryman.errors import OutOfSlots
from ferryman.schedule.batch import PrefillStep
from ferryman.schedule.events import Cached, Finished, Retracted
from ferryman.schedule.request import FinishReason
from ferryman.schedule.sequence import Goal

SIZES = {Kind.FULL: 40, Kind.WINDOW: 40, Kind.RECURRENT: 24}
STEMS = ([1] * 9, [1] * 17, [2] * 13)
PROMPTS = st.builds(
    lambda stem, tail: [*stem, *tail],
    st.sampled_from(STEMS),
    st.lists(st.integers(0, 2), max_size=9),
)
ARRIVALS = st.tuples(
    st.just("arrive"), PROMPTS, st.integers(1, 9), st.sampled_from(["no", "host", "corrupt"])
)
STEPS = st.tuples(st.sampled_from(["plan", "run", "both", "cancel"]), st.integers(1, 12))
SCRIPTS = st.lists(st.one_of(ARRIVALS, STEPS), max_size=30)


def worker_for(manifest: StateManifest, **sizes: int) -> WatchedWorker:
    asked = {kind: sizes.get(kind.value, SIZES[kind]) for kind in manifest.kinds}
    return WatchedWorker(manifest, asked)


class Host:
    """What another worker wrote through: an arena, and its units by key."""

    def __init__(self, manifest: StateManifest) -> None:
        self.arena = bytearray()
        self.units: dict[tuple[Kind, bytes], HostUnit] = {}
        writer = FakeWorker(manifest, {kind: SIZES[kind] for kind in manifest.kinds})
        for index, stem in enumerate(STEMS):
            writer.submit(request(manifest, f"w{index}", [*stem, 2, 2, 1], 2))
            writer.drain()
        for cached in writer.seen(Cached):
            for unit in writer.scheduler.chain_units(cached.keys):
                content = bytes(writer.engine.transfer.read(unit.kind, unit.handle.slot))
                host = HostUnit(
                    unit.kind,
                    unit.page_index,
                    unit.key,
                    len(self.arena),
                    len(content),
                    digest_of(content),
                )
                self.units[unit.kind, unit.key] = host
                self.arena += content

    def view(self, keys: tuple[bytes, ...], how: str) -> HostView:
        if how == "no":
            return EMPTY_HOST
        found = {
            (kind, page): self.units[kind, key]
            for page, key in enumerate(keys)
            for kind in Kind
            if (kind, key) in self.units
        }
        if how == "corrupt":
            found = {name: replace(unit, digest=bytes(16)) for name, unit in found.items()}
        return HostView(found)


HOSTS = {name: Host(manifest) for name, manifest in MANIFESTS.items()}


def play(worker: FakeWorker, host: Host, script: list[tuple[object, ...]]) -> set[str]:
    """Runs a script to its end, and then the worker until it is idle; who was cancelled."""
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
                    if step != "run":
                        worker.plan()
                    if step != "plan":
                        worker.run_oldest()
    worker.drain()
    return cancelled


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(MANIFESTS)),
    overlap=st.booleans(),
    full=st.integers(10, 24),
    script=SCRIPTS,
)
def test_rows_4_21_22_24_42_books_tree_and_initialisers_are_true_after_every_step(
    name: str, overlap: bool, full: int, script: list[tuple[object, ...]]
) -> None:
    """The worker checks itself after each step; here is what must hold at the end."""
    manifest = MANIFESTS[name]
    sizes = {Kind.FULL: full, Kind.WINDOW: 26, Kind.RECURRENT: 9}
    worker = WatchedWorker(
        manifest, {kind: sizes[kind] for kind in manifest.kinds}, overlap=overlap
    )
    cancelled = play(worker, HOSTS[name], script)
    for request_id in set(worker.requests) - cancelled:
        assert worker.tokens[request_id] == worker.expected(request_id)
    assert is_all_cached(worker)
    worker.scheduler.flush()
    for pool in worker.pools.values():
        assert pool.num_free == pool.num_slots
        assert set(pool.freed.values()) <= {0, 1}
        assert sum(pool.freed.values()) == sum(pool._generations)


# Row 2: the operations of a slot travel with the batch that uses it.


def test_row_2_a_request_admitted_without_a_chunk_keeps_its_copy_for_its_first_batch() -> None:
    """The step's budget ends between two requests: the second's copy waits, leased, for its own."""
    worker = worker_for(HYBRID)
    worker.submit(request(HYBRID, "r0", [1] * 14, 2))
    worker.drain()
    worker.submit(request(HYBRID, "r1", [2] * 6, 2))
    worker.submit(request(HYBRID, "r2", [1] * 12 + [3] * 9, 2))
    worker.plan()
    (first,) = worker.queued
    assert isinstance(first, PrefillStep)
    assert [chunk.request_id for chunk in first.chunks] == ["r1"]
    assert not first.ops.copies
    assert worker.scheduler.ledgers()[Kind.RECURRENT].by_role[Role.SLOT_OP.value] == 1
    worker.plan()
    second = worker.queued[-1]
    assert isinstance(second, PrefillStep)
    assert [(len(second.ops.copies), chunk.request_id) for chunk in second.chunks] == [(1, "r2")]
    worker.drain()
    assert worker.tokens["r2"] == worker.expected("r2")


def test_row_2_a_request_pushed_back_is_cleared_anew_in_its_replacement_slot() -> None:
    worker = WatchedWorker(HYBRID, {Kind.FULL: 9, Kind.RECURRENT: 12})
    for index in range(3):
        worker.submit(request(HYBRID, f"r{index}", [index] * 6, max_tokens=18))
    worker.drain()
    assert worker.seen(Retracted)
    for request_id in worker.requests:
        assert worker.tokens[request_id] == worker.expected(request_id)


# Row 21: a rejection and an abort give back what was taken, and nothing else.


def cached_worker(manifest: StateManifest) -> WatchedWorker:
    """A worker that holds a prefix of [1] * 17."""
    worker = worker_for(manifest)
    worker.submit(request(manifest, "r0", [1] * 17, 2))
    worker.drain()
    return worker


def fill_up(worker: FakeWorker) -> None:
    """Takes every slot that the tree does not hold; it is not given back."""
    holder = Holder(Role.TRANSFER_IN, "filler")
    for handle in worker.scheduler.residence.tree.handles():
        worker.scheduler.lease((handle,), holder)
    for pool in worker.scheduler.residence.pools.by_kind.values():
        pool.try_allocate(pool.num_free, holder)


@pytest.mark.parametrize("name", sorted(MANIFESTS))
def test_row_21_a_request_that_is_not_admitted_holds_nothing(name: str) -> None:
    worker = cached_worker(MANIFESTS[name])
    fill_up(worker)
    before = books(worker)
    worker.scheduler.submit(request(worker.manifest, "r1", [1] * 17 + [2] * 9, 3), Goal.DECODE)
    for now in range(3):
        assert worker.scheduler.plan(float(now)) is None
        assert books(worker) == before
    with pytest.raises(OutOfSlots):
        worker.scheduler.reserve("res", request(worker.manifest, "r2", [1] * 30, 3), 9.0)
    assert books(worker) == before
    assert worker.scheduler.cancel("r1", 10.0)
    assert books(worker) == before


@pytest.mark.parametrize("steps", range(9))
@pytest.mark.parametrize("in_flight", [True, False], ids=["in flight", "committed"])
@pytest.mark.parametrize("goal", list(Goal))
def test_row_21_an_abort_at_any_point_leaves_only_what_is_cached(
    goal: Goal, in_flight: bool, steps: int
) -> None:
    worker = cached_worker(ALL_KINDS)
    worker.submit(request(ALL_KINDS, "r1", [1] * 17 + [2] * 9, 20), goal)
    for _ in range(steps):
        worker.plan()
        worker.run_oldest()
    if in_flight:
        worker.plan()
    assert worker.scheduler.cancel("r1", worker.now)
    worker.collect()
    worker.drain()
    assert is_all_cached(worker)
    assert len([event for event in worker.seen(Finished) if event.request_id == "r1"]) == 1


# Row 24: a window page is freed once, by whoever of slide, swap and eviction is the last.


@pytest.mark.parametrize("manifest", [ALL_KINDS, ATTENTION], ids=["all kinds", "attention"])
def test_row_24_a_window_page_that_slides_out_while_it_is_cached_is_freed_once(
    manifest: StateManifest,
) -> None:
    """Both prompts compute the same windows side by side, donate them, and slide past them."""
    worker = worker_for(manifest)
    for index in range(2):
        worker.submit(request(manifest, f"r{index}", [1] * 17, 20))
    worker.drain()
    assert is_all_cached(worker)
    worker.scheduler.flush()
    pool = worker.pools[Kind.WINDOW]
    assert set(pool.freed.values()) == {1}
    assert pool.num_free == pool.num_slots


# Row 38: whether there is room is asked each time, never remembered.


def free_by_reservation(worker: FakeWorker) -> Callable[[], object]:
    worker.scheduler.reserve("res", request(HYBRID, "other", [3] * 30, 2), 1.0)
    return lambda: worker.scheduler.free_reservation("res")


def free_by_transfer(worker: FakeWorker) -> Callable[[], object]:
    pools, holder = worker.scheduler.residence.pools, Holder(Role.TRANSFER_OUT, "t")
    taken = pools.try_allocate({Kind.FULL: 8}, holder)
    assert taken is not None
    return lambda: worker.scheduler.release(taken[Kind.FULL], holder)


@pytest.mark.parametrize("hold", [free_by_reservation, free_by_transfer])
def test_row_38_an_idle_worker_admits_as_soon_as_somebody_else_frees_slots(
    hold: Callable[[FakeWorker], Callable[[], object]],
) -> None:
    worker = FakeWorker(HYBRID, {Kind.FULL: 9, Kind.RECURRENT: 9})
    free = hold(worker)
    worker.submit(request(HYBRID, "r0", [1] * 14, 2))
    assert not worker.plan(), "there is no room yet"
    assert worker.scheduler.statistics().waiting == 1
    free()
    assert worker.plan(), "nobody ran, so nobody could leave and say that there is room"
    worker.drain()
    assert worker.tokens["r0"] == worker.expected("r0")


def test_row_38_a_full_worker_that_is_emptied_by_cancelling_admits_at_once() -> None:
    worker = FakeWorker(HYBRID, {Kind.FULL: 40, Kind.RECURRENT: 24}, max_running=1)
    worker.submit(request(HYBRID, "r0", [1] * 6, 9))
    worker.submit(request(HYBRID, "r1", [2] * 6, 2))
    for _ in range(3):
        worker.plan()
        worker.run_oldest()
    while worker.run_oldest():
        pass
    assert worker.scheduler.cancel("r0", worker.now)
    worker.drain()
    assert worker.tokens["r1"] == worker.expected("r1")


# Row 39: what ends, ends once.


@pytest.mark.parametrize("steps", range(1, 12))
def test_row_39_cancelling_what_has_ended_changes_nothing(steps: int) -> None:
    worker = worker_for(HYBRID)
    worker.submit(request(HYBRID, "r0", [1] * 6, 4))
    for _ in range(steps):
        worker.plan()
        if steps % 2:
            worker.run_oldest()
    is_first = worker.scheduler.cancel("r0", worker.now)
    before = books(worker)
    assert not worker.scheduler.cancel("r0", worker.now)
    assert books(worker) == before
    worker.drain()
    finished = worker.seen(Finished)
    assert [event.request_id for event in finished] == ["r0"]
    assert is_first == (finished[0].reason is FinishReason.CANCELLED)
    assert is_all_cached(worker)


def test_row_39_a_request_that_ends_while_it_is_being_pushed_back_leaves_once() -> None:
    """Its last token is on its way when a neighbour needs its pages; then somebody cancels it."""
    for max_tokens in range(2, 16):
        for cancels in (False, True):
            worker = WatchedWorker(HYBRID, {Kind.FULL: 6, Kind.RECURRENT: 12})
            worker.submit(request(HYBRID, "r0", [1] * 7, 14))
            worker.submit(request(HYBRID, "r1", [2] * 7, max_tokens))
            while worker.plan() or worker.run_oldest():
                if cancels and not worker.scheduler._decoding:
                    worker.scheduler.cancel("r1", worker.now)
            worker.drain()
            ended = sorted(event.request_id for event in worker.seen(Finished))
            assert ended == ["r0", "r1"]
            assert is_all_cached(worker)


def test_row_39_a_reservation_is_freed_once_and_never_after_it_was_adopted() -> None:
    worker = worker_for(HYBRID)
    worker.scheduler.reserve("res", request(HYBRID, "r0", [1] * 9, 3), 1.0)
    assert worker.scheduler.free_reservation("res")
    assert not worker.scheduler.free_reservation("res")
    assert books(worker) == {}
    check_books(worker)


# Row 42: what is cached is what its key says (see also the first test).


def test_row_42_tracks_cached_at_any_length_hold_the_state_of_that_length() -> None:
    for max_tokens in range(1, 14):
        worker = worker_for(HYBRID)
        worker.submit(request(HYBRID, "r0", [1] * 6, max_tokens))
        worker.drain()
        depth = (6 + max_tokens - 1) // PAGE
        snapshots = [
            unit.page_index
            for event in worker.seen(Cached)
            for unit in event.units
            if unit.kind is Kind.RECURRENT
        ]
        assert max(snapshots) == depth - 1, "the last full page that was consumed has its state"
