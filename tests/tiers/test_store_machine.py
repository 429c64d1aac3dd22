"""Any order of events at the host tier against a naive model with a stamped arena.

Every byte range of the modelled arena holds the stamp of its last writer. A writer that was given
room writes at any time until it reports that it stopped, or dies. Leased units and visible units
must keep their own stamps.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.tiers.state_shapes import PAGE_SIZE, chain, manifest_of

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.cache.resume import resume_set
from ferryman.cache.units import HostUnit
from ferryman.errors import LeaseLost
from ferryman.tiers.layout import ArenaLayout, PoolRegion
from ferryman.tiers.store import HostStore
from ferryman.tiers.values import (
    AcquireRequest,
    ReservedUnit,
    ReserveRequest,
    StoreLimits,
    UnitForgotten,
    UnitStored,
    WorkerLife,
)

Stamp = tuple[Kind, PageKey]
KINDS = (
    (Kind.FULL,),
    (Kind.FULL, Kind.RECURRENT),
    (Kind.FULL, Kind.WINDOW),
    (Kind.FULL, Kind.WINDOW, Kind.RECURRENT),
    (Kind.RECURRENT,),
)
LIMITS = StoreLimits(lease_seconds=5.0, max_leases=100, max_reservations=100)
chains = st.lists(st.integers(1, 2), min_size=1, max_size=5)


@dataclass
class StoreReader:
    worker: WorkerLife
    units: tuple[HostUnit, ...]
    end: float


@dataclass
class StoreWriter:
    worker: WorkerLife
    keys: tuple[PageKey, ...]
    units: tuple[ReservedUnit, ...]
    end: float


class HostTierMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.names = 0
        self.epochs = {"prefill-a": 1, "decode-b": 1}
        self.arena: dict[int, Stamp] = {}
        self.visible: set[Stamp] = set()
        self.readers: dict[str, StoreReader] = {}
        self.writers: dict[str, StoreWriter] = {}
        self.ended: list[str] = []

    @initialize(kinds=st.sampled_from(KINDS), sizes=st.tuples(*[st.integers(1, 5)] * 3))
    def make(self, kinds: tuple[Kind, ...], sizes: tuple[int, int, int]) -> None:
        self.manifest = manifest_of(*kinds)
        regions, offset = {}, 0
        for kind, num_slots in zip(kinds, sizes, strict=False):
            slot_bytes = self.manifest.layout(kind).slot_bytes
            regions[kind] = PoolRegion(offset, slot_bytes, num_slots)
            offset += slot_bytes * num_slots
        self.store = HostStore(self.manifest, ArenaLayout(regions), LIMITS)

    def name(self) -> str:
        self.names += 1
        return f"lease-{self.names}"

    def life(self, worker_id: str) -> WorkerLife:
        return WorkerLife(worker_id, self.epochs[worker_id])

    def hear(self) -> None:
        for effect in self.store.drain_effects():
            match effect:
                case UnitStored():
                    assert (effect.kind, effect.key) not in self.visible
                    self.visible.add((effect.kind, effect.key))
                case UnitForgotten():
                    self.visible.remove((effect.kind, effect.key))

    def pick(self, names: list[str], which: int) -> str:
        return names[which % len(names)]

    @rule(
        pages=chains,
        shares=st.lists(st.booleans(), min_size=15, max_size=15),
        worker_id=st.sampled_from(["prefill-a", "decode-b"]),
    )
    def reserve(self, pages: list[int], shares: list[bool], worker_id: str) -> None:
        keys, name = chain(*pages), self.name()
        units = {
            kind: [p for p in range(len(keys)) if kind is Kind.FULL or shares[5 * i + p]]
            for i, kind in enumerate(self.manifest.kinds)
        }
        before = set(self.visible)
        leased = self.leased_and_visible()
        worker = self.life(worker_id)
        room = self.store.reserve(ReserveRequest(name, worker, keys, units), self.now)
        self.hear()
        assert self.visible <= before, "something became visible without a commit"
        assert leased <= self.visible, "a leased unit was evicted"
        for unit in room:
            assert (unit.kind, keys[unit.page_index]) not in self.visible, "stored twice"
        if room:
            self.check_nobody_elses(room)
            self.writers[name] = StoreWriter(worker, keys, room, self.now + LIMITS.lease_seconds)

    def leased_and_visible(self) -> set[Stamp]:
        """Units that readers lease and that are also found, at the same bytes, under their keys."""
        units = [unit for reader in self.readers.values() for unit in reader.units]
        return {
            (unit.kind, unit.key)
            for unit in units
            if (found := self.store.unit(unit.kind, unit.key))
            and self.store.layout.offset_of(unit.kind, found.index) == unit.offset
        }

    def check_nobody_elses(self, room: tuple[ReservedUnit, ...]) -> None:
        mine = {unit.offset for unit in room}
        assert len(mine) == len(room)
        for writer in self.writers.values():
            assert not mine & {unit.offset for unit in writer.units}, "two may write there"
        for reader in self.readers.values():
            assert not mine & {unit.offset for unit in reader.units}, "somebody reads there"
        for kind, key in self.visible:
            found = self.store.unit(kind, key)
            assert found is not None
            assert self.store.layout.offset_of(kind, found.index) not in mine

    @precondition(lambda self: self.writers)
    @rule(which=st.integers(0, 99), share=st.booleans())
    def write(self, which: int, share: bool) -> None:
        """Writes in time or too late: the store cannot stop a writer."""
        writer = self.writers[self.pick(list(self.writers), which)]
        for unit in writer.units[:: 2 if share else 1]:
            self.arena[unit.offset] = (unit.kind, writer.keys[unit.page_index])

    @precondition(lambda self: self.writers)
    @rule(which=st.integers(0, 99))
    def commit(self, which: int) -> None:
        name = self.pick(list(self.writers), which)
        writer = self.writers.pop(name)
        digests = {}
        for unit in writer.units:
            stamp = (unit.kind, writer.keys[unit.page_index])
            self.arena[unit.offset] = stamp
            digests[unit.kind, unit.page_index] = b"".join((stamp[0].encode(), stamp[1]))
        wanted = {(unit.kind, writer.keys[unit.page_index]) for unit in writer.units}
        try:
            self.store.commit(name, digests, self.now)
        except LeaseLost:
            self.hear()
            return
        assert self.now < writer.end, "a commit after the lease's end"
        self.hear()
        assert wanted <= self.visible, "a group became visible in part"

    @precondition(lambda self: self.writers)
    @rule(which=st.integers(0, 99))
    def give_up(self, which: int) -> None:
        name = self.pick(list(self.writers), which)
        del self.writers[name]
        self.store.release(name)
        self.ended.append(name)

    @rule(
        pages=chains,
        have=st.integers(0, 3),
        worker_id=st.sampled_from(["prefill-a", "decode-b"]),
    )
    def acquire(self, pages: list[int], have: int, worker_id: str) -> None:
        keys, name = chain(*pages), self.name()
        worker = self.life(worker_id)
        ask = AcquireRequest(name, worker, keys, min(have, len(keys)), 0, len(keys))
        grant = self.store.acquire(ask, self.now)
        for unit in grant.units:
            assert unit.key == keys[unit.page_index]
            assert (unit.kind, unit.key) in self.visible
            assert unit.digest == unit.kind.encode() + unit.key
        self.check_usable(ask, grant.usable_pages, grant.units)
        if grant.units:
            self.readers[name] = StoreReader(worker, grant.units, self.now + LIMITS.lease_seconds)

    def check_usable(self, ask: AcquireRequest, depth: int, units: tuple[HostUnit, ...]) -> None:
        """The whole resume set is granted or on the reader's device; and it is the deepest."""
        granted = {(unit.kind, unit.page_index) for unit in units}
        for deeper in range(len(ask.keys), 0, -1):
            needs = resume_set(self.manifest, deeper * PAGE_SIZE)
            set_of = {(Kind.FULL, p) for p in range(ask.have_pages, needs.full.end)}
            set_of |= {(Kind.WINDOW, p) for p in range(needs.window.first, needs.window.end)}
            set_of |= {(Kind.RECURRENT, deeper - 1)} if needs.needs_snapshot else set()
            full = {(Kind.FULL, p) for p in range(needs.full.end)}
            is_here = all((kind, ask.keys[p]) in self.visible for kind, p in set_of | full)
            if deeper == depth:
                assert set_of <= granted
                return
            assert not (is_here and set_of), "a deeper resume point was here"

    @precondition(lambda self: self.readers)
    @rule(which=st.integers(0, 99))
    def release(self, which: int) -> None:
        name = self.pick(list(self.readers), which)
        del self.readers[name]
        self.store.release(name)

    @rule()
    def renew(self) -> None:
        lost = self.store.renew([*self.readers, *self.writers, *self.ended], self.now)
        known: dict[str, StoreReader | StoreWriter] = {**self.readers, **self.writers}
        for name, lease in known.items():
            assert (name in lost) == (self.now >= lease.end)
            if name not in lost:
                lease.end = self.now + LIMITS.lease_seconds
        assert set(self.ended) <= set(lost)

    @rule(seconds=st.sampled_from([0.5, 3.0, 5.0]))
    def wait(self, seconds: float) -> None:
        """Moves the time: a lease may expire before the sweep, and other rules run in between."""
        self.now += seconds

    @rule()
    def sweep(self) -> None:
        self.store.expire(self.now)
        self.readers = {n: r for n, r in self.readers.items() if self.now < r.end}
        assert self.store.statistics().num_leases == len(self.readers), "each ends with its time"

    @rule(worker_id=st.sampled_from(["prefill-a", "decode-b"]))
    def kill(self, worker_id: str) -> None:
        gone = self.life(worker_id)
        self.epochs[worker_id] += 1
        self.readers = {n: r for n, r in self.readers.items() if r.worker != gone}
        self.writers = {n: w for n, w in self.writers.items() if w.worker != gone}
        self.store.on_worker_gone(gone)

    @precondition(lambda self: self.visible)
    @rule(which=st.integers(0, 99))
    def find_corrupt(self, which: int) -> None:
        kind, key = sorted(self.visible)[which % len(self.visible)]
        self.store.drop_corrupt(kind, key)
        self.hear()
        assert (kind, key) not in self.visible

    @invariant()
    def every_stamp_is_right(self) -> None:
        if not hasattr(self, "store"):
            return
        self.store.check_integrity()
        for kind, key in self.visible:
            found = self.store.unit(kind, key)
            assert found is not None
            assert self.arena[self.store.layout.offset_of(kind, found.index)] == (kind, key)
        for reader in self.readers.values():
            for unit in reader.units:
                assert self.arena[unit.offset] == (unit.kind, unit.key), "overwritten under a lease"

    def teardown(self) -> None:
        """Once all are gone, everything is free or resident."""
        if not hasattr(self, "store"):
            return
        for worker_id in self.epochs:
            self.kill(worker_id)
        for counts in self.store.statistics().kinds.values():
            assert (counts.reserved, counts.leased, counts.leaving) == (0, 0, 0)
            assert counts.total == counts.free + counts.resident


TestHostTier = HostTierMachine.TestCase
TestHostTier.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
