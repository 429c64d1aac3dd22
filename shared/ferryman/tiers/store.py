"""The host tier as a value: what is resident, who reads it, who may write, what is given up.

Pure: no bytes, no clock, no socket. A unit is visible only when its group was committed; what is
leased is never evicted; a slot that a living writer may still write to is never given to another.
What others have to know, the index above all, comes out of `drain_effects`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ferryman.cache.branch import Branch
from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.slots import TREE, Demand, Holder, Pools, Role, SlotHandle
from ferryman.cache.tree import PrefixTree
from ferryman.cache.units import HostUnit
from ferryman.errors import InvalidRequest, LeaseLost
from ferryman.tiers.layout import ArenaLayout
from ferryman.tiers.matching import residency, usable_depths, usable_pages, window_before
from ferryman.tiers.room import LARGEST_PREFIX, Group, Offer, RoomPolicy, by_kind, demand_of
from ferryman.tiers.tables import LeaseTable, ReadLease, ReleasedNames, Reservation
from ferryman.tiers.values import (
    AcquireAsk,
    Effect,
    EvictionRefused,
    Grant,
    KindCounts,
    KindStatistics,
    LeaseAsk,
    ReserveAsk,
    ReservedUnit,
    Residency,
    StoreLimits,
    StoreStatistics,
    UnitForgotten,
    UnitName,
    UnitStored,
    WorkerLife,
)

# The deepest resume point, and one to fall back on where its bytes cost more than computing.
MAX_SNAPSHOTS_GRANTED = 2


@dataclass(frozen=True, slots=True)
class _Resident:
    handle: SlotHandle
    digest: bytes
    root: PageKey


class HostStore:
    """The units of one model's state in one arena."""

    def __init__(self, manifest: StateManifest, layout: ArenaLayout, limits: StoreLimits) -> None:
        self.manifest, self.layout, self.limits = manifest, layout, limits
        self._pools = Pools(layout.num_slots)
        self._tree = PrefixTree.of(manifest)
        self._resident: dict[tuple[Kind, PageKey], _Resident] = {}
        self._readers: LeaseTable[ReadLease] = LeaseTable(limits.max_leases)
        self._writers: LeaseTable[Reservation] = LeaseTable(limits.max_reservations)
        self._released = ReleasedNames(limits.max_released_names)
        self._effects: list[Effect] = []
        self._hits = self._misses = 0
        self._counts = {kind: Counter[str]() for kind in manifest.kinds}

    # Matching.

    def lookup(self, keys: Sequence[PageKey]) -> Residency:
        """What is here of a chain; touches nothing."""
        return residency(self._tree, self.manifest, keys)

    def usable_pages(self, keys: Sequence[PageKey]) -> int:
        """How far, in pages, what is here of a chain can be resumed from; touches nothing."""
        return usable_pages(self._tree, self.manifest, keys)

    def resident(self, kind: Kind, key: PageKey) -> tuple[SlotHandle, bytes] | None:
        """Where a unit lies and what its digest should be."""
        found = self._resident.get((kind, key))
        return (found.handle, found.digest) if found else None

    def deepest_chain(self, units: Iterable[tuple[Kind, PageKey]]) -> tuple[PageKey, ...]:
        """The keys of all pages up to the deepest unit of these that is here; none: no keys."""
        here = [self._tree.node(key) for kind, key in units if self._tree.has(kind, key)]
        deepest = max(here, key=lambda node: (node.depth, node.key), default=None)
        return self._tree.chain(deepest.key) if deepest else ()

    def free_share(self, kind: Kind) -> float:
        """How much of a kind's slots is free."""
        pool = self._pools[kind]
        return pool.num_free / pool.num_slots

    def next_to_evict(self, kind: Kind) -> Iterator[PageKey]:
        """Pages in the order in which eviction would give up their units of a kind."""
        return self._tree.next_to_evict(kind, self._is_only_tree)

    # Readers.

    def acquire(self, ask: AcquireAsk, now: float) -> Grant:
        """Leases the best usable prefix beyond what the reader has, or nothing."""
        self._released.check(ask.lease_id)
        self._readers.check_new(ask.lease_id)
        matched = self._tree.match_depth(ask.keys)
        points = self._resume_points(ask, matched)
        names = self._granted(ask, matched, points)
        is_hit = bool(points and names)
        self._hits, self._misses = self._hits + is_hit, self._misses + (not is_hit)
        if not names:
            return Grant(0, ())
        self._lease(ask, names, max(matched if ask.have_pages < matched else 0, *points, 0), now)
        self._count("num_hits", (kind for kind, _ in names))
        units = tuple(self._host_unit(kind, page, ask.keys[page]) for kind, page in names)
        return Grant(max(points, default=0), units)

    def lease(
        self,
        ask: LeaseAsk,
        now: float,
    ) -> tuple[HostUnit, ...]:
        """Leases those of the units named that are here, to copy them elsewhere; no hit and no use.

        The names of lost leases may be used again by nobody. No lease where nothing is here.
        """
        self._released.check(ask.lease_id)
        self._readers.check_new(ask.lease_id)
        names = [name for name in ask.names if self._tree.has(name[0], ask.keys[name[1]])]
        if not names:
            return ()
        slots = tuple(self._tree.slot(kind, ask.keys[page]) for kind, page in names)
        holder = Holder(Role.LOAD, ask.lease_id)
        lease = ReadLease(ask.worker, holder, slots, now + self.limits.lease_seconds)
        self._pools.lease(slots, holder)
        self._readers.add(ask.lease_id, lease)
        return tuple(self._host_unit(kind, page, ask.keys[page]) for kind, page in names)

    def _resume_points(self, ask: AcquireAsk, matched: int) -> list[int]:
        limit = min(matched, ask.max_pages)
        most = MAX_SNAPSHOTS_GRANTED if Kind.RECURRENT in self.manifest.kinds else 1
        points: list[int] = []
        for depth in usable_depths(self._tree, self.manifest, ask.keys, limit):
            if depth <= ask.min_pages or len(points) == most:
                break
            points.append(depth)
        return points

    def _granted(self, ask: AcquireAsk, matched: int, points: Sequence[int]) -> list[UnitName]:
        """Full pages even beyond the last resume point: they show where a known path is left."""
        kinds = self.manifest.kinds
        names: list[UnitName] = []
        if Kind.FULL in kinds:
            names += [(Kind.FULL, page) for page in range(ask.have_pages, matched)]
        if Kind.WINDOW in kinds:
            pages = sorted(
                {page for depth in points for page in window_before(self.manifest, depth)}
            )
            names += [(Kind.WINDOW, page) for page in pages]
        if Kind.RECURRENT in kinds:
            names += [(Kind.RECURRENT, depth - 1) for depth in sorted(points)]
        return names

    def _lease(self, ask: AcquireAsk, names: Sequence[UnitName], depth: int, now: float) -> None:
        """Leases what is granted, and the last page: with it no page before can be evicted."""
        granted = [self._tree.slot(kind, ask.keys[page]) for kind, page in names]
        slots = tuple(dict.fromkeys((*granted, *self._anchors(ask.keys, depth))))
        for page in {depth - 1, *(page for kind, page in names if kind is not Kind.FULL)}:
            self._tree.touch(ask.keys[page], now)
        lease = ReadLease(
            ask.worker, Holder(Role.LOAD, ask.lease_id), slots, now + self.limits.lease_seconds
        )
        self._pools.lease(slots, lease.holder)
        self._readers.add(ask.lease_id, lease)

    def _anchors(self, keys: Sequence[PageKey], depth: int) -> tuple[SlotHandle, ...]:
        """The slot whose lease keeps the path of `depth` pages in the tree."""
        if depth == 0 or Kind.FULL not in self.manifest.kinds:
            return ()
        return (self._tree.slot(Kind.FULL, keys[depth - 1]),)

    def _host_unit(self, kind: Kind, page: int, key: PageKey) -> HostUnit:
        found = self._resident[kind, key]
        offset = self.layout.offset_of(kind, found.handle.slot)
        return HostUnit(kind, page, key, offset, self.layout.slot_bytes(kind), found.digest)

    # Writers.

    def offer(self, keys: Sequence[PageKey], units: Mapping[Kind, Sequence[int]]) -> Offer:
        """What of these units would be new here, and which resume points they would make."""
        return Offer(self.manifest, keys, units, self._tree)

    def reserve(
        self, ask: ReserveAsk, now: float, *, room: RoomPolicy = LARGEST_PREFIX
    ) -> tuple[ReservedUnit, ...]:
        """Room for what is new of an offer: of all of it, or of as much as `room` settles for."""
        self._released.check(ask.lease_id)
        self._writers.check_new(ask.lease_id)
        offer = self.offer(ask.keys, ask.units)
        end = now + self.limits.lease_seconds
        below = Holder(Role.REQUEST, ask.lease_id)
        anchor = ReadLease(ask.worker, below, self._anchors(ask.keys, offer.base), end)
        self._pools.lease(anchor.slots, below)
        if offer.base:
            self._tree.touch(ask.keys[offer.base - 1], now)
        holder = Holder(Role.TRANSFER_IN, ask.lease_id)
        slots = self._take_room(offer, room, holder, anchor)
        if not slots:
            self._pools.release(anchor.slots, below)
            return ()
        reservation = Reservation(ask.worker, holder, ask.keys, offer.base, slots, anchor, end)
        self._writers.add(ask.lease_id, reservation)
        return tuple(self._reserved_unit(name, slot) for name, slot in slots.items())

    def _take_room(
        self, offer: Offer, policy: RoomPolicy, holder: Holder, anchor: ReadLease
    ) -> dict[UnitName, SlotHandle]:
        """Evicts for the first choice that can fit at all, then takes the first that does; `anchor`
        keeps what that choice reuses."""
        has_evicted = False

        def room() -> Mapping[Kind, int]:
            pools = [self._pools[kind] for kind in self.manifest.kinds]
            return {p.kind: p.num_free if has_evicted else p.num_slots for p in pools}

        for group, depth in policy.choices(offer, room):
            demand = demand_of(group)
            reused = tuple(self._tree.slot(*unit) for unit in offer.reused(depth))
            if not self._may_fit(demand, reused):
                continue
            self._pools.lease(reused, anchor.holder)
            if not has_evicted:
                self._evict(demand)
                has_evicted = True
            if taken := self._pools.try_allocate(demand, holder):
                anchor.slots = (*anchor.slots, *reused)
                return _assigned(group, taken)
            self._pools.release(reused, anchor.holder)
        return {}

    def _may_fit(self, demand: Demand, reused: Sequence[SlotHandle]) -> bool:
        """Whether the pools are large enough for both."""
        kept = Counter(handle.kind for handle in reused)
        return all(
            count + kept[kind] <= self._pools[kind].num_slots for kind, count in demand.items()
        )

    def _evict(self, demand: Demand) -> None:
        for kind in demand:
            lack = self._pools.shortage(demand).get(kind, 0)
            if lack:
                dropped = self._tree.evict(kind, lack, self._is_only_tree)
                self._pools.release(dropped, TREE)
                self._count("num_evicted", self._note_changes())
            if short := self._pools.shortage(demand).get(kind, 0):
                self._effects.append(EvictionRefused(kind, short))

    def flush(self) -> int:
        """Gives up everything that nobody reads or writes; how many units that were."""
        before = len(self._resident)
        for kind, num_slots in self.layout.num_slots.items():
            self._pools.release(self._tree.evict(kind, num_slots, self._is_only_tree), TREE)
        self._count("num_evicted", self._note_changes())
        return before - len(self._resident)

    def _is_only_tree(self, handle: SlotHandle) -> bool:
        return self._pools[handle.kind].holders(handle) == (TREE,)

    def _reserved_unit(self, name: UnitName, handle: SlotHandle) -> ReservedUnit:
        kind, page = name
        offset = self.layout.offset_of(kind, handle.slot)
        return ReservedUnit(kind, page, offset, self.layout.slot_bytes(kind))

    def commit(self, lease_id: str, digests: Mapping[UnitName, bytes], now: float) -> int:
        """Makes a group visible and says how many units of it are new. It is all, or LeaseLost."""
        reservation = self._writers.get(lease_id)
        if reservation is None:
            raise LeaseLost(f"no reservation {lease_id}")
        if digests.keys() != reservation.slots.keys():
            raise InvalidRequest("digests do not name just the units reserved", "digests")
        self._writers.pop(lease_id)
        if reservation.is_quarantined or now >= reservation.end or not self._stands(reservation):
            self._free(reservation)
            raise LeaseLost(f"reservation {lease_id} is over")
        stored = self._insert(reservation, digests, now)
        self._pools.release(reservation.anchor.slots, reservation.anchor.holder)
        return stored

    def commit_arrived(
        self, lease_id: str, digests: Mapping[UnitName, bytes], now: float
    ) -> tuple[UnitName, ...]:
        """Makes visible, of the units that have arrived, those up to the deepest resume point that
        they complete; says which. All others stay the writer's, to be written, committed or
        released. Raises LeaseLost when there is no such reservation any more, and changes nothing.
        """
        reservation = self._writers.get(lease_id)
        if reservation is None or reservation.is_quarantined or now >= reservation.end:
            raise LeaseLost(f"reservation {lease_id} is over")
        if not digests.keys() <= reservation.slots.keys():
            raise InvalidRequest("digests name units that were not reserved", "digests")
        offer = self.offer(reservation.keys, by_kind(digests))
        group = offer.up_to(next(offer.points(), 0)) if self._stands(reservation) else ()
        if not group:
            return ()
        arrived = {name: reservation.slots[name] for name in group}
        rest = {name: slot for name, slot in reservation.slots.items() if name not in arrived}
        reservation.slots = rest
        self._insert(replace(reservation, slots=arrived), digests, now)
        return group

    def _stands(self, reservation: Reservation) -> bool:
        """Whether the pages below are still here: a corrupt one takes all above along."""
        return self._tree.match_depth(reservation.keys[: reservation.base]) == reservation.base

    def _insert(
        self, reservation: Reservation, digests: Mapping[UnitName, bytes], now: float
    ) -> int:
        """The tree keeps its own slot where another writer was quicker; ours is freed."""
        units: dict[Kind, dict[int, SlotHandle]] = {}
        for (kind, page), handle in reservation.slots.items():
            units.setdefault(kind, {})[page] = handle
        top = 1 + max(page for _, page in reservation.slots)
        keys = reservation.keys[:top]
        inserted = self._tree.insert(Branch(keys, units), now)
        adopted = set(inserted.adopted)
        self._pools.move(inserted.adopted, reservation.holder, TREE)
        own = [slot for slot in reservation.slots.values() if slot not in adopted]
        self._pools.release(own, reservation.holder)
        for (kind, page), handle in reservation.slots.items():
            if handle in adopted:
                found = _Resident(handle, digests[kind, page], keys[0])
                self._resident[kind, keys[page]] = found
        self._note_changes()
        self._count("num_stored", (handle.kind for handle in adopted))
        return len(adopted)

    def _free(self, reservation: Reservation) -> None:
        """The writer will not write again: its slots are anybody's."""
        self._pools.release(reservation.slots.values(), reservation.holder)
        self._pools.release(reservation.anchor.slots, reservation.anchor.holder)

    # Time, releases and deaths.

    def renew(self, lease_ids: Iterable[str], now: float) -> tuple[str, ...]:
        """Prolongs leases of readers and writers; says which are gone."""
        lost, end = [], now + self.limits.lease_seconds
        for name in lease_ids:
            lease = self._readers.get(name) or self._writers.get(name)
            if lease is None or now >= lease.end:
                lost.append(name)
            else:
                lease.end = end
        return tuple(lost)

    def release(self, lease_id: str) -> None:
        """The owner's word that it reads or writes no more under this name."""
        if lease := self._readers.pop(lease_id):
            self._pools.release(lease.slots, lease.holder)
        elif reservation := self._writers.pop(lease_id):
            self._free(reservation)
        else:
            self._released.add(lease_id)

    def expire(self, now: float) -> None:
        """Ends what is over: a reader's lease is freed, a writer's slots go into quarantine."""
        for name in self._readers.over(now):
            self.release(name)
        for name in self._writers.over(now):
            reservation = self._writers.get(name)
            assert reservation is not None, "a name just listed is in the table"
            self._quarantine(reservation)

    def _quarantine(self, reservation: Reservation) -> None:
        if not reservation.is_quarantined:
            reservation.is_quarantined = True
            self._pools.release(reservation.anchor.slots, reservation.anchor.holder)
            reservation.anchor.slots = ()

    def worker_gone(self, worker: WorkerLife) -> None:
        """This life is over: nobody reads or writes for it any more."""
        for name in [*self._readers.of(worker), *self._writers.of(worker)]:
            self.release(name)

    # Dropping.

    def drop_corrupt(self, kind: Kind, key: PageKey) -> int:
        """Drops a unit whose bytes are not those written, and all pages that stand on it."""
        if (kind, key) not in self._resident:
            return 0
        self._pools.release(self._tree.drop(kind, key), TREE)
        self._count("num_corrupt", [kind])
        return len(self._note_changes())

    def _note_changes(self) -> list[Kind]:
        """Tells the index what came and went; the kinds of the units that went."""
        gone: list[Kind] = []
        changes = self._tree.drain_changes()
        for kind, key, is_stored in [(c.kind, key, c.is_stored) for c in changes for key in c.keys]:
            if is_stored:
                self._effects.append(self._stored_effect(kind, key))
                continue
            found = self._resident.pop((kind, key))
            self._effects.append(UnitForgotten(kind, key, found.root))
            gone.append(kind)
        return gone

    def _stored_effect(self, kind: Kind, key: PageKey) -> UnitStored:
        found = self._resident[kind, key]
        return UnitStored(
            kind,
            key,
            found.root,
            self.layout.slot_bytes(kind),
            found.digest,
            found.handle.generation,
        )

    # Telling.

    def drain_effects(self) -> tuple[Effect, ...]:
        """What happened since the last call, in order."""
        effects, self._effects = tuple(self._effects), []
        return effects

    def holdings(self) -> Iterator[UnitStored]:
        """Everything resident, in the order in which it came, so parents first: what is announced
        anew to an index that was away. What comes and goes while this is read may, or must not, be
        among it."""
        names = tuple(self._resident)
        return (self._stored_effect(*name) for name in names if name in self._resident)

    def statistics(self) -> StoreStatistics:
        return StoreStatistics(
            kinds={kind: self.kind_statistics(kind) for kind in self.manifest.kinds},
            num_leases=len(self._readers),
            num_reservations=len(self._writers),
            num_quarantined=sum(len(w.slots) for w in self._writers if w.is_quarantined),
            num_hits=self._hits,
            num_misses=self._misses,
            num_stored=self._sum("num_stored"),
            num_evicted=self._sum("num_evicted"),
            num_corrupt=self._sum("num_corrupt"),
        )

    def _count(self, what: str, kinds: Iterable[Kind]) -> None:
        """One unit more for each kind named, by a field of KindCounts."""
        for kind, number in Counter(kinds).items():
            self._counts[kind][what] += number

    def _sum(self, what: str) -> int:
        return sum(counts[what] for counts in self._counts.values())

    def counts(self, kind: Kind) -> KindCounts:
        return KindCounts(**self._counts[kind])

    def num_free(self, kind: Kind) -> int:
        """Slots of a kind that are free now."""
        return self._pools[kind].num_free

    def kind_statistics(self, kind: Kind) -> KindStatistics:
        """Looks at every slot of the kind."""
        ledger = self._pools[kind].ledger()
        resident = ledger.by_role.get(Role.TREE, 0)
        reserved = ledger.by_role.get(Role.TRANSFER_IN, 0)
        leased = ledger.by_role.get(Role.LOAD, 0)
        leaving = ledger.leased - resident - reserved
        return KindStatistics(ledger.total, ledger.free, resident, reserved, leased, leaving)

    def check_integrity(self) -> None:
        """Raises AssertionError unless pools, tree and tables tell the same story."""
        self._pools.check_integrity()
        self._tree.check_integrity()
        held = {self._tree.slot(kind, key): (kind, key) for kind, key in self._tree.units()}
        assert {r.handle: name for name, r in self._resident.items()} == held, (
            "units are miscounted"
        )
        for handle in held:
            assert TREE in self._pools[handle.kind].holders(handle), f"{handle} is nobody's"
        for reservation in self._writers:
            for handle in reservation.slots.values():
                owners = self._pools[handle.kind].holders(handle)
                assert owners == (reservation.holder,), f"{handle} has owners {owners}"
        for kind, counts in self.statistics().kinds.items():
            assert counts.leaving >= 0, f"{kind}: more resident and reserved than leased"


def _assigned(
    group: Group, taken: Mapping[Kind, Sequence[SlotHandle]]
) -> dict[UnitName, SlotHandle]:
    free = {kind: iter(slots) for kind, slots in taken.items()}
    return {(kind, page): next(free[kind]) for kind, page in group}
