"""Any order of events at the storage tier against a naive model with a stamped disk.

Each place of a modelled file bears the stamp of the unit written there. A kill loses the work that
was decided but not done yet, and all that is not on disk; what comes back must be right all the
same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.tiers.state_shapes import chain, manifest_of

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.cache.units import Tier
from ferryman.tiers.extents import DropUnit, ExtentTable, WholeExtentTable, aligned
from ferryman.tiers.storage import StorageStore
from ferryman.tiers.storage_values import ExtentPlan, Flaw, FoundExtent, StorageLimits, UnitCorrupt
from ferryman.tiers.values import StoredUnit, UnitForgotten, UnitName, UnitStored

Stamp = tuple[Kind, PageKey]
KINDS = (
    (Kind.FULL,),
    (Kind.FULL, Kind.RECURRENT),
    (Kind.FULL, Kind.WINDOW),
    (Kind.FULL, Kind.WINDOW, Kind.RECURRENT),
    (Kind.RECURRENT,),
)
chains = st.lists(st.integers(1, 2), min_size=1, max_size=5)
booleans = st.lists(st.booleans(), min_size=15, max_size=15)


@dataclass
class StorageReader:
    units: tuple[StoredUnit, ...]
    end: float


class StorageTierMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.names = 0
        self.disk: dict[int, FoundExtent] = {}
        self.visible: dict[Stamp, int] = {}
        self.readers: dict[str, StorageReader] = {}
        self.writing: dict[int, ExtentPlan] = {}
        self.paths: dict[PageKey, tuple[PageKey, ...]] = {}

    @initialize(
        kinds=st.sampled_from(KINDS), num_pages=st.integers(2, 14), num_foreign=st.integers(0, 3)
    )
    def make(self, kinds: tuple[Kind, ...], num_pages: int, num_foreign: int) -> None:
        self.manifest = manifest_of(*kinds)
        self.limits = StorageLimits(num_pages * 4096, lease_seconds=5.0)
        for generation in range(1, num_foreign + 1):
            self.disk[generation] = FoundExtent(generation, "other", (), (), 4096, 8192, 12288)
        self.start()

    def start(self) -> None:
        self.store = StorageStore(self.manifest, self.limits, self.table())
        self.visible.clear()
        self.readers.clear()
        self.writing.clear()
        self.store.restore(self.disk.values(), self.now)
        self.hear()

    def hear(self) -> set[Stamp]:
        """Applies effects to the model; what went because it was corrupt."""
        for effect in self.store.drain_effects():
            match effect:
                case UnitStored():
                    assert effect.tier is Tier.STORAGE
                    assert (effect.kind, effect.key) not in self.visible
                    self.visible[effect.kind, effect.key] = effect.generation
                case UnitForgotten():
                    assert effect.tier is Tier.STORAGE
                    del self.visible[effect.kind, effect.key]
                case UnitCorrupt():
                    assert (effect.kind, effect.key) not in self.visible
        return set(self.visible)

    def work(self) -> None:
        for each in self.store.drain_work():
            extent = self.disk.get(each.generation)
            assert extent is not None, "work on a file that is not there"
            if isinstance(each, DropUnit):
                units = tuple(unit for unit in extent.units if unit.index != each.index)
                assert len(units) == len(extent.units) - 1, "dropped twice"
                self.disk[each.generation] = self.shrunk(extent, units)
            else:
                del self.disk[each.generation]

    def table(self) -> ExtentTable:
        return ExtentTable()

    def on_disk(self) -> int:
        return sum(extent.num_bytes for extent in self.disk.values())

    def shrunk(self, extent: FoundExtent, units: tuple[StoredUnit, ...]) -> FoundExtent:
        num_bytes = extent.header_bytes + sum(aligned(unit.num_bytes) for unit in units)
        return replace(extent, units=units, num_bytes=num_bytes)

    def leased(self) -> set[Stamp]:
        units = [unit for reader in self.readers.values() for unit in reader.units]
        return {(u.kind, u.key) for u in units if self.store.stands(u)}

    @rule(pages=chains, shares=booleans)
    def plan(self, pages: list[int], shares: list[bool]) -> None:
        keys, leased = chain(*pages), self.leased()
        for depth, key in enumerate(keys):
            self.paths[key] = keys[: depth + 1]
        digests: dict[UnitName, bytes] = {
            (kind, page): kind.encode() + keys[page]
            for i, kind in enumerate(self.manifest.kinds)
            for page in range(len(keys))
            if kind is Kind.FULL or shares[5 * i + page]
        }
        is_idle = not (self.readers or self.writing)
        is_new = all(
            (kind, key) not in self.visible for kind in self.manifest.kinds for key in keys
        )
        plan = self.store.plan(keys, digests, self.now)
        self.hear()
        assert leased <= set(self.visible), "a leased unit was evicted"
        if plan is not None:
            for unit in plan.units:
                assert (unit.kind, unit.key) not in self.visible, "stored twice"
                assert unit.digest == unit.kind.encode() + unit.key
            self.check_layout(plan)
            assert plan.generation not in self.disk
            self.writing[plan.generation] = plan
        if (
            is_idle
            and is_new
            and digests
            and 4096 * (1 + len(digests)) <= self.limits.capacity_bytes
        ):
            assert plan is not None, "nothing is in the way of this group"
            assert len(plan.units) == len(digests)

    def check_layout(self, plan: ExtentPlan) -> None:
        end = 0
        for unit in plan.units:
            assert unit.offset % 4096 == 0
            assert unit.offset >= end
            end = unit.offset + unit.num_bytes
        assert plan.file_bytes == aligned(end)

    @precondition(lambda self: self.writing)
    @rule(which=st.integers(0, 99), is_well=st.booleans())
    def finish(self, which: int, is_well: bool) -> None:
        generation = sorted(self.writing)[which % len(self.writing)]
        plan = self.writing.pop(generation)
        if not is_well:
            self.store.abort(generation)
            self.hear()
            return
        self.write(plan)
        before = set(self.visible)
        num_new = self.store.commit(generation, self.now)
        self.hear()
        assert len(set(self.visible) - before) == num_new
        assert set(self.visible) >= before

    def write(self, plan: ExtentPlan) -> None:
        size = plan.file_bytes - sum(aligned(unit.num_bytes) for unit in plan.units)
        digest = self.manifest.digest
        self.disk[plan.generation] = FoundExtent(
            plan.generation, digest, plan.keys, plan.units, size, plan.file_bytes, plan.file_bytes
        )

    @rule(pages=chains)
    def lease(self, pages: list[int]) -> None:
        keys = chain(*pages)
        self.names += 1
        name = f"reader-{self.names}"
        names = [(kind, page) for kind in self.manifest.kinds for page in range(len(keys))]
        units = self.store.lease(name, keys, names, self.now)
        here = {(kind, page) for kind, page in names if (kind, keys[page]) in self.visible}
        assert {(unit.kind, unit.page_index) for unit in units} == here
        for unit in units:
            assert unit.generation == self.visible[unit.kind, unit.key]
        if units:
            self.readers[name] = StorageReader(units, self.now + 5.0)

    @precondition(lambda self: self.readers)
    @rule(which=st.integers(0, 99))
    def release(self, which: int) -> None:
        name = sorted(self.readers)[which % len(self.readers)]
        del self.readers[name]
        self.store.release(name)

    @rule(seconds=st.sampled_from([0.5, 3.0, 5.0]), renews=st.booleans())
    def wait(self, seconds: float, renews: bool) -> None:
        self.now += seconds
        if renews:
            lost = self.store.renew(self.readers, self.now)
            assert set(lost) == {n for n, each in self.readers.items() if self.now >= each.end}
            for name in self.readers.keys() - set(lost):
                self.readers[name].end = self.now + 5.0
        self.store.expire(self.now)
        self.readers = {n: each for n, each in self.readers.items() if self.now < each.end}
        assert self.store.statistics().num_leases == len(self.readers), "each ends with its time"

    @precondition(lambda self: self.visible)
    @rule(which=st.integers(0, 99))
    def find_corrupt(self, which: int) -> None:
        stamp = sorted(self.visible)[which % len(self.visible)]
        unit = self.unit(*stamp)
        assert self.store.drop_corrupt(unit, Flaw.DIGEST) > 0
        assert self.store.drop_corrupt(unit, Flaw.DIGEST) == 0
        assert stamp not in self.hear()

    def unit(self, kind: Kind, key: PageKey) -> StoredUnit:
        units = self.disk[self.visible[kind, key]].units
        return next(unit for unit in units if (unit.kind, unit.key) == (kind, key))

    @rule(writes=st.booleans(), works=st.booleans())
    def kill(self, writes: bool, works: bool) -> None:
        """The process dies: files may be renamed without a commit, and drops be done or not."""
        before = dict(self.visible)
        if works:
            self.work()
        if writes:
            for plan in self.writing.values():
                self.write(plan)
        had_writing = bool(self.writing)
        self.start()
        if works and not had_writing:
            assert set(self.visible) == set(before), "something whole was lost or came back"

    @invariant()
    def all_tell_the_same(self) -> None:
        if not hasattr(self, "store"):
            return
        self.store.check_integrity()
        counts = self.store.statistics()
        assert {(u.kind, u.key) for u in self.store.holdings()} == set(self.visible)
        assert sum(each.num_units for each in counts.kinds.values()) == len(self.visible)
        for kind, key in self.visible:
            unit = self.unit(kind, key)
            assert unit.digest == kind.encode() + key
            if Kind.FULL in self.manifest.kinds:
                assert all((Kind.FULL, page) in self.visible for page in self.paths[key])

    @rule()
    def catch_up(self) -> None:
        """With all work done, what is charged is just what is on disk."""
        self.work()
        on_disk = self.on_disk()
        reserved = sum(plan.file_bytes for plan in self.writing.values())
        counts = self.store.statistics()
        assert counts.used_bytes == on_disk + reserved
        assert counts.num_extents == len(self.disk)


class WholeExtentsMachine(StorageTierMachine):
    """The same on a medium without holes: a file has its length until it is removed."""

    def table(self) -> ExtentTable:
        return WholeExtentTable()

    def on_disk(self) -> int:
        return sum(extent.file_bytes for extent in self.disk.values())

    def write(self, plan: ExtentPlan) -> None:
        """A file is written when all work decided before is done."""
        self.work()
        super().write(plan)
        assert self.on_disk() <= self.limits.capacity_bytes


TestStorageTier = StorageTierMachine.TestCase
TestStorageTier.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestWholeExtents = WholeExtentsMachine.TestCase
TestWholeExtents.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
