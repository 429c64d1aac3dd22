"""When a group of units should be written to storage as fast as it can."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

from tests.tiers.state_shapes import chain, manifest_of

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.tiers.layout import ArenaLayout, PoolRegion
from ferryman.tiers.store import HostStore
from ferryman.tiers.values import LeaseRequest, ReserveRequest, Residency, StoreLimits, WorkerLife
from ferryman.tiers.write_policy import write_policy_named
from ferryman.tiers.writeback import WritebackBacklog, WritebackGroup, WritebackJob

NUM_SLOTS = 20
MANIFEST = manifest_of(Kind.FULL)
WORKER = WorkerLife("writer", 1)


class Writeback:
    """A host tier of one pool and its backlog; storage has nothing."""

    def __init__(self) -> None:
        region = PoolRegion(0, MANIFEST.layout(Kind.FULL).slot_bytes, NUM_SLOTS)
        self.host = HostStore(MANIFEST, ArenaLayout({Kind.FULL: region}), StoreLimits())
        self.backlog = WritebackBacklog[str](write_policy_named("write_through"), lambda: None)
        self._numbers = count()

    def add(self, keys: Sequence[PageKey]) -> int:
        """A worker copies a prompt as far as there is room; returns how many pages."""
        name = f"write-{next(self._numbers)}"
        pages = {Kind.FULL: tuple(range(len(keys)))}
        room = self.host.reserve(ReserveRequest(name, WORKER, tuple(keys), pages), 0.0)
        if room:
            digests = {(unit.kind, unit.page_index): bytes(16) for unit in room}
            self.host.commit(name, digests, 0.0)
        self.backlog.on_host_effects(self.host.drain_effects(), "")
        return len(room)

    def next_job(self) -> WritebackJob[str]:
        job = self.backlog.take()
        assert job is not None
        return job

    def groups(self, job: WritebackJob[str]) -> Iterator[WritebackGroup]:
        """Each is leased while it is written."""
        for group in self.backlog.groups(job, self.host, lambda _: Residency(0, {Kind.FULL: ()})):
            name = f"read-{next(self._numbers)}"
            self.host.lease(LeaseRequest(name, WORKER, group.chain, group.names), 0.0)
            yield group
            self.host.release(name)


def test_a_group_is_hurried_by_further_jobs_and_by_further_groups_of_its_own() -> None:
    it = Writeback()
    it.add(chain(1))
    it.add(chain(2))
    first = it.next_job()
    assert [it.backlog.is_behind for _ in it.groups(first)] == [True]
    both = WritebackJob((*first.units, *it.next_job().units), "")
    assert [it.backlog.is_behind for _ in it.groups(both)] == [True, False]
    assert not it.backlog.is_behind


def test_a_group_is_hurried_that_leaves_less_than_a_quarter_of_a_pool() -> None:
    it = Writeback()
    for num_pages, is_behind in ((16, True), (15, False)):
        assert it.add(chain(*range(num_pages * 100, num_pages * 101))) == num_pages
        assert [it.backlog.is_behind for _ in it.groups(it.next_job())] == [is_behind]


def test_a_full_tier_hurries_nothing_while_old_units_can_go() -> None:
    it = Writeback()
    for first in (100, 200, 300):
        assert it.add(chain(*range(first, first + 10))) == 10
        assert [it.backlog.is_behind for _ in it.groups(it.next_job())] == [False]
    assert it.host.num_free(Kind.FULL) == 0


def test_a_group_is_hurried_once_its_slots_were_wanted() -> None:
    it = Writeback()
    it.add(chain(*range(100, 112)))
    for _ in it.groups(it.next_job()):
        assert not it.backlog.is_behind
        assert it.add(chain(*range(200, 215))) < 15
        it.backlog.take()
        assert it.backlog.is_behind
    it.add(chain(300))
    assert [it.backlog.is_behind for _ in it.groups(it.next_job())] == [False]
