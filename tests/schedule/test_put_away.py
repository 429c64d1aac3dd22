"""Retraction while the state is copied to another tier: it is kept until the copy has ended."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.harness.schedule import ATTENTION, HYBRID, MANIFESTS, SIZES, ScheduledWorker, request

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.node import Branch
from ferryman.cache.resume import HostView
from ferryman.cache.slots import SlotHandle
from ferryman.cache.tree import PrefixTree
from ferryman.cache.units import HostUnit
from ferryman.engine.memory.transfer import digest_of
from ferryman.schedule.events import Retracted, SequenceAdmitted
from ferryman.schedule.retraction import resume_units

PAGE = 4


def worker_for(manifest: StateManifest, full: int, *, overlap: bool = True) -> ScheduledWorker:
    """Three requests grow to seven pages each."""
    worker = ScheduledWorker(manifest, SIZES | {Kind.FULL: full}, overlap=overlap, max_running=3)
    worker.scheduler.retraction.pin_retracted()
    for name in range(3):
        worker.submit(request(manifest, f"r{name}", [name + 1] * 9, 18))
    return worker


class Elsewhere:
    """Copies offloaded state to an arena, and offers it to the waiting request."""

    def __init__(self, worker: ScheduledWorker) -> None:
        self.worker = worker
        self.arena = bytearray()
        self.num_offered = 0
        self._heard = 0

    def copy_all(self) -> None:
        """Copies the state of retractions so far, releases it and offers it back."""
        scheduler = self.worker.scheduler
        heard, self._heard = self._heard, len(self.worker.events)
        for event in self.worker.events[heard:]:
            if isinstance(event, Retracted):
                view = self._copied(event)
                scheduler.retraction.release_retracted(event.request_id)
                self.num_offered += scheduler.offer_host(event.request_id, view)

    def _copied(self, event: Retracted) -> HostView:
        engine, found = self.worker.engine, {}
        for unit in self.worker.scheduler.resume_units(event.request.keys):
            content = bytes(engine.transfer.read(unit.kind, unit.handle.slot))
            digest = digest_of(content)
            host = HostUnit(
                unit.kind, unit.page_index, unit.key, len(self.arena), len(content), digest
            )
            self.arena += content
            found[unit.kind, unit.page_index] = host
        engine.host_tier.attach(memoryview(bytes(self.arena)))
        return HostView(found)


def drain(worker: ScheduledWorker, elsewhere: Elsewhere, patience: int = 0) -> None:
    """Runs to the end; copies end `patience` rounds late, or when nothing else goes on."""
    waited = 0
    for _ in range(3000):
        moved = worker.plan() | worker.run_oldest()
        waited += 1
        if waited > patience or not moved:
            elsewhere.copy_all()
            waited = 0
        if not moved and not worker.scheduler.has_work:
            break
    assert not worker.queued


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", MANIFESTS)
@given(full=st.integers(14, 20), patience=st.integers(0, 6))
def test_what_is_put_away_comes_back_exactly(
    name: str, overlap: bool, full: int, patience: int
) -> None:
    worker = worker_for(MANIFESTS[name], full, overlap=overlap)
    drain(worker, elsewhere := Elsewhere(worker), patience)
    assert worker.seen(Retracted), "pages were to run out"
    for request_id in worker.requests:
        assert worker.tokens[request_id] == worker.expected(request_id)
    worker.scheduler.flush()
    assert all(
        ledger.balances and not ledger.by_role for ledger in worker.scheduler.ledgers().values()
    )
    assert elsewhere.arena


@pytest.mark.parametrize("name", MANIFESTS)
def test_what_the_tree_has_lost_is_loaded_from_elsewhere(name: str) -> None:
    worker = worker_for(MANIFESTS[name], 14)
    elsewhere = Elsewhere(worker)
    drain(worker, elsewhere)
    resumed = [event.plan for event in worker.seen(SequenceAdmitted) if event.is_resumed]
    loaded = [plan for plan in resumed if plan.loads]
    assert loaded, "the tree's copy was to be evicted before they came back"
    for plan in loaded:
        assert plan.position % PAGE == 0
        assert plan.prompt_len - plan.position <= PAGE


def test_no_further_request_is_retracted_while_room_is_about_to_come() -> None:
    """Or every request would be pushed back while one is being copied."""
    worker = worker_for(HYBRID, 14)
    for _ in range(300):
        if not (worker.plan() | worker.run_oldest()):
            break
    assert len(worker.seen(Retracted)) == 1, "nobody has copied it yet"
    assert worker.scheduler.has_work
    worker.scheduler.retraction.release_retracted(worker.seen(Retracted)[0].request_id)
    drain(worker, Elsewhere(worker))
    for request_id in worker.requests:
        assert worker.tokens[request_id] == worker.expected(request_id)


def test_letting_go_of_what_was_never_kept_is_fine() -> None:
    worker = worker_for(ATTENTION, 20)
    worker.scheduler.retraction.release_retracted("nobody")


def test_where_the_last_page_has_no_window_the_point_before_it_is_put_away() -> None:
    """Windows leave the tree without their pages; a repeat resumes where one is left."""
    manifest = ATTENTION
    keys = request(manifest, "repeat", [7] * 25, 1).keys
    pages = {page: SlotHandle(Kind.FULL, page, 1) for page in range(6)}
    windows = {page: SlotHandle(Kind.WINDOW, page, 1) for page in (0, 1)}
    tree = PrefixTree.of(manifest)
    assert not resume_units(manifest, tree, keys)
    tree.insert(Branch(keys, {Kind.FULL: pages}), 1.0)
    assert not resume_units(manifest, tree, keys)
    tree.insert(Branch(keys, {Kind.WINDOW: windows}), 2.0)
    found = [(unit.kind, unit.page_index) for unit in resume_units(manifest, tree, keys)]
    assert found == [(kind, page) for kind in (Kind.FULL, Kind.WINDOW) for page in (0, 1)]
