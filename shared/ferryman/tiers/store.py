"""The host tier as a value: resident units, their readers, reservations of writers, eviction.

Pure: no bytes, no clock, no socket. A unit becomes visible when its group is committed; a leased
unit is never evicted; a slot that a living writer may still write to is never given to another.
`drain_effects` returns changes for other components, above all for the index.

SGLang's HiCache and LMCache do this for attention state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.slots import TREE, Demand, Holder, Prepare, Role, SlotHandle, is_ready
from ferryman.cache.units import HostUnit, Tier
from ferryman.errors import InvalidRequest, LeaseLost
from ferryman.tiers.layout import ArenaLayout, ArenaSlots
from ferryman.tiers.leases import HostReservation, LeaseTable, ReadLease, ReleasedNames
from ferryman.tiers.unit_group import LARGEST_PREFIX, RoomPolicy, WriteOffer, by_kind, demand_of
from ferryman.tiers.unit_store import UnitStore, granted_units, resume_points
from ferryman.tiers.values import (
    AcquireGrant,
    AcquireRequest,
    EvictionRefused,
    LeaseRequest,
    ReservedUnit,
    ReserveRequest,
    StoreLimits,
    StoreStatistics,
    UnitName,
    WorkerLife,
)


class HostStore(UnitStore):
    """The units of one model's state in one arena; `prepare` makes its memory ready for slots."""

    def __init__(
        self,
        manifest: StateManifest,
        layout: ArenaLayout,
        limits: StoreLimits,
        prepare: Prepare = is_ready,
    ) -> None:
        self.layout, self.limits = layout, limits
        self._slots = ArenaSlots(layout, prepare)
        super().__init__(manifest, Tier.HOST, self._slots)
        self._readers: LeaseTable[ReadLease] = LeaseTable(limits.max_leases)
        self._writers: LeaseTable[HostReservation] = LeaseTable(limits.max_reservations)
        self._released = ReleasedNames(limits.max_released_names)
        self._hits = self._misses = 0

    # Readers.

    def acquire(self, ask: AcquireRequest, now: float) -> AcquireGrant:
        """Leases the best usable prefix beyond what the reader has, or nothing."""
        self._check_new_reader(ask.lease_id)
        matched = self._tree.match_depth(ask.keys)
        points = resume_points(self._tree, self.manifest, ask, matched)
        names = granted_units(self.manifest, ask, matched, points)
        is_hit = bool(points and names)
        self._hits, self._misses = self._hits + is_hit, self._misses + (not is_hit)
        if not names:
            return AcquireGrant(0, ())
        depth = max(matched if ask.have_pages < matched else 0, *points, 0)
        self._lease_granted(ask, names, depth, now)
        for kind, _ in names:
            self._count(kind, num_hits=1)
        return AcquireGrant(max(points, default=0), self._host_units(ask.keys, names))

    def is_awaited(self, ask: AcquireRequest, not_by: Sequence[WorkerLife]) -> bool:
        """Whether a writer, but for those in `not_by`, is about to complete a resume point for this
        reader that is deeper than all that are here. A page of its chain decides, or a snapshot."""
        points = resume_points(self._tree, self.manifest, ask, self._tree.match_depth(ask.keys))
        deepest = max(points, default=ask.min_pages)
        decisive = Kind.RECURRENT if Kind.RECURRENT in self.manifest.kinds else Kind.FULL
        return any(
            kind is decisive
            and deepest <= page < ask.max_pages
            and writer.keys[page] == ask.keys[page]
            for writer in self._writers
            if writer.worker not in not_by and not (writer.is_quarantined or writer.is_dropped)
            for kind, page in writer.slots
        )

    def lease(self, ask: LeaseRequest, now: float) -> tuple[HostUnit, ...]:
        """Leases the named units that are here, for a copy; counts neither a hit nor a use.

        The name of a lost lease cannot be used again. Makes no lease when no unit is here.
        """
        self._check_new_reader(ask.lease_id)
        names = [name for name in ask.names if self._tree.has(name[0], ask.keys[name[1]])]
        if not names:
            return ()
        self._add_reader(ask.lease_id, ask.worker, self._slots_of(ask.keys, names), now)
        return self._host_units(ask.keys, names)

    def _check_new_reader(self, lease_id: str) -> None:
        self._released.check(lease_id)
        self._readers.check_new(lease_id)

    def _lease_granted(
        self, ask: AcquireRequest, names: Sequence[UnitName], depth: int, now: float
    ) -> None:
        """Leases the granted units and the last page, which keeps every page before it from
        eviction."""
        granted = self._slots_of(ask.keys, names)
        slots = tuple(dict.fromkeys((*granted, *self._anchor(ask.keys, depth))))
        for page in {depth - 1, *(page for kind, page in names if kind is not Kind.FULL)}:
            self._tree.touch(ask.keys[page], now)
        self._add_reader(ask.lease_id, ask.worker, slots, now)

    def _add_reader(
        self, lease_id: str, worker: WorkerLife, slots: tuple[SlotHandle, ...], now: float
    ) -> None:
        lease = ReadLease(worker, Holder(Role.LOAD, lease_id), slots, self._lease_end(now))
        self._slots.pools.lease(slots, lease.holder)
        self._readers.add(lease_id, lease)

    def _lease_end(self, now: float) -> float:
        return now + self.limits.lease_seconds

    def _slots_of(
        self, keys: Sequence[PageKey], names: Iterable[UnitName]
    ) -> tuple[SlotHandle, ...]:
        return self._handles((kind, keys[page]) for kind, page in names)

    def _host_units(
        self, keys: Sequence[PageKey], names: Iterable[UnitName]
    ) -> tuple[HostUnit, ...]:
        units = [(kind, page, self._resident[kind, keys[page]].unit) for kind, page in names]
        return tuple(
            HostUnit(kind, page, keys[page], unit.offset, unit.num_bytes, unit.digest)
            for kind, page, unit in units
        )

    # Writers.

    def reserve(
        self, ask: ReserveRequest, now: float, *, room: RoomPolicy = LARGEST_PREFIX
    ) -> tuple[ReservedUnit, ...]:
        """Reserves room for the new units of an offer: all of them, or a group that `room`
        accepts."""
        self._released.check(ask.lease_id)
        self._writers.check_new(ask.lease_id)
        offer = self.offer(ask.keys, ask.units)
        end = self._lease_end(now)
        below = Holder(Role.REQUEST, ask.lease_id)
        anchor = ReadLease(ask.worker, below, self._anchor(ask.keys, offer.base), end)
        # Lease before eviction: the offer stands on these pages.
        self._slots.pools.lease(anchor.slots, below)
        if offer.base:
            self._tree.touch(ask.keys[offer.base - 1], now)
        holder = Holder(Role.TRANSFER_IN, ask.lease_id)
        slots = self._take_room(offer, room, holder, anchor)
        if not slots:
            self._slots.pools.release(anchor.slots, below)
            return ()
        reservation = HostReservation(ask.worker, holder, ask.keys, offer.base, slots, anchor, end)
        self._writers.add(ask.lease_id, reservation)
        return tuple(self._slots.room(name, slot) for name, slot in slots.items())

    def _take_room(
        self, offer: WriteOffer, policy: RoomPolicy, holder: Holder, anchor: ReadLease
    ) -> dict[UnitName, SlotHandle]:
        """Evicts for the first choice that can fit at all, then takes the first that fits; `anchor`
        keeps the units that this choice reuses."""
        pools, has_evicted = self._slots.pools, False

        def room() -> Mapping[Kind, int]:
            return self._slots.free_slots() if has_evicted else self.layout.num_slots

        for group, depth in policy.choices(offer, room):
            demand, reused = demand_of(group), self._handles(offer.reused(depth))
            if not self._slots.may_fit(demand, reused):
                continue
            # Lease before eviction, which may otherwise remove units that this choice reuses.
            pools.lease(reused, anchor.holder)
            if not has_evicted:
                self._make_room(demand)
                has_evicted = True
            if taken := self._slots.try_take(group, holder):
                anchor.slots = (*anchor.slots, *reused)
                return taken
            pools.release(reused, anchor.holder)
        return {}

    def _make_room(self, demand: Demand) -> None:
        for kind in demand:
            if lack := self._slots.pools.shortage(demand).get(kind, 0):
                self._evict(kind, lack)
            if short := self._slots.pools.shortage(demand).get(kind, 0):
                self._effects.append(EvictionRefused(kind, short))

    def commit(self, lease_id: str, digests: Mapping[UnitName, bytes], now: float) -> int:
        """Makes a whole group visible and returns how many of its units are new; raises LeaseLost
        if it cannot."""
        reservation = self._writers.get(lease_id)
        if reservation is None:
            raise LeaseLost(f"no reservation {lease_id}")
        if digests.keys() != reservation.slots.keys():
            raise InvalidRequest("digests do not name just the units reserved", "digests")
        self._writers.pop(lease_id)
        if reservation.is_quarantined or now >= reservation.end or not self._stands(reservation):
            self._free(reservation)
            raise LeaseLost(f"reservation {lease_id} is over")
        stored = self._insert_group(reservation, digests, now)
        self._slots.pools.release(reservation.anchor.slots, reservation.anchor.holder)
        return stored

    def commit_arrived(
        self, lease_id: str, digests: Mapping[UnitName, bytes], now: float
    ) -> tuple[UnitName, ...]:
        """Makes the arrived units visible up to the deepest resume point that they complete, and
        returns them. The writer keeps all others, to write, commit or release them. Raises
        LeaseLost, and changes nothing, when there is no such reservation any more."""
        reservation = self._writers.get(lease_id)
        if reservation is None or reservation.is_quarantined or now >= reservation.end:
            raise LeaseLost(f"reservation {lease_id} is over")
        if not digests.keys() <= reservation.slots.keys():
            raise InvalidRequest("digests name units that were not reserved", "digests")
        offer = self.offer(reservation.keys, by_kind(digests))
        group = offer.prefix(next(offer.points(), 0)) if self._stands(reservation) else ()
        if not group:
            return ()
        arrived = {name: reservation.slots[name] for name in group}
        rest = {name: slot for name, slot in reservation.slots.items() if name not in arrived}
        reservation.slots = rest
        self._insert_group(replace(reservation, slots=arrived), digests, now)
        return group

    def _stands(self, reservation: HostReservation) -> bool:
        """Whether the pages below are still here: dropping a corrupt page drops the pages above
        it."""
        if reservation.is_dropped:
            return False
        return self._tree.match_depth(reservation.keys[: reservation.base]) == reservation.base

    def _insert_group(
        self, reservation: HostReservation, digests: Mapping[UnitName, bytes], now: float
    ) -> int:
        """Inserts the units and returns how many are new. Frees the slots of all others."""
        keys, slots = reservation.keys, reservation.slots
        units = [
            self._slots.unit(name, keys[name[1]], slot, digests[name])
            for name, slot in slots.items()
        ]
        top = 1 + max(unit.page_index for unit in units)
        new = self._insert(keys[:top], units, now)
        adopted = dict.fromkeys(unit.handle for unit in new)
        self._slots.pools.move(adopted, reservation.holder, TREE)
        duplicates = [slot for slot in slots.values() if slot not in adopted]
        self._slots.pools.release(duplicates, reservation.holder)
        for unit in new:
            self._count(unit.kind, num_stored=1)
        return len(new)

    def _free(self, reservation: HostReservation) -> None:
        """Frees the slots of a reservation whose writer will not write again."""
        self._slots.pools.release(reservation.slots.values(), reservation.holder)
        self._slots.pools.release(reservation.anchor.slots, reservation.anchor.holder)

    # Time, releases and deaths.

    def renew(self, lease_ids: Iterable[str], now: float) -> tuple[str, ...]:
        """Prolongs leases of readers and writers; returns the names of those that are gone."""
        lost, end = [], self._lease_end(now)
        for name in lease_ids:
            table = self._readers if name in self._readers else self._writers
            if not table.renew(name, now, end):
                lost.append(name)
        return tuple(lost)

    def release(self, lease_id: str) -> None:
        """Ends a lease or reservation: its owner no longer reads or writes under this name."""
        if lease := self._readers.pop(lease_id):
            self._slots.pools.release(lease.slots, lease.holder)
        elif reservation := self._writers.pop(lease_id):
            self._free(reservation)
        else:
            self._released.add(lease_id)

    def expire(self, now: float) -> tuple[str, ...]:
        """Ends leases whose time is over: readers' slots are freed, writers' slots go into
        quarantine. Returns the names that nobody will use again."""
        ended = tuple(self._readers.over(now))
        for name in ended:
            self.release(name)
        for name in self._writers.over(now):
            reservation = self._writers.get(name)
            assert reservation is not None, "a name just listed is in the table"
            self._quarantine(reservation)
        return ended

    def _quarantine(self, reservation: HostReservation) -> None:
        if not reservation.is_quarantined:
            reservation.is_quarantined = True
            self._slots.pools.release(reservation.anchor.slots, reservation.anchor.holder)
            reservation.anchor.slots = ()

    def on_worker_gone(self, worker: WorkerLife) -> tuple[str, ...]:
        """Releases everything of a worker process that has ended; returns the names."""
        readers = [name for name, lease in self._readers.items() if lease.worker == worker]
        writers = [name for name, lease in self._writers.items() if lease.worker == worker]
        ended = (*readers, *writers)
        for name in ended:
            self.release(name)
        return ended

    # Dropping.

    def drop_corrupt(self, kind: Kind, key: PageKey) -> int:
        """Drops a unit whose bytes differ from those written, and all pages that stand on it."""
        if dropped := self.drop(kind, key):
            self._count(kind, num_corrupt=1)
        return dropped

    def drop_chain(self, first: PageKey) -> int:
        """Drops all units of chains that begin with this page, leased or not, and those being
        written; returns how many were resident."""
        for reservation in self._writers:
            reservation.is_dropped |= reservation.keys[0] == first
        if dropped := super().drop_chain(first):
            self._count(self.manifest.kinds[0], num_corrupt=1)
        return dropped

    # Reports.

    def statistics(self) -> StoreStatistics:
        counts = [self.counts(kind) for kind in self.manifest.kinds]
        return StoreStatistics(
            kinds={kind: self._slots.statistics(kind) for kind in self.manifest.kinds},
            num_leases=len(self._readers),
            num_reservations=len(self._writers),
            num_quarantined=sum(len(w.slots) for w in self._writers if w.is_quarantined),
            num_hits=self._hits,
            num_misses=self._misses,
            num_stored=sum(count.num_stored for count in counts),
            num_evicted=sum(count.num_evicted for count in counts),
            num_corrupt=sum(count.num_corrupt for count in counts),
        )

    def num_free(self, kind: Kind) -> int:
        """Slots of a kind that are free now."""
        return self._slots.pools[kind].num_free

    def free_share(self, kind: Kind) -> float:
        """The free share of a kind's slots."""
        return self.num_free(kind) / self._slots.pools[kind].num_slots

    def check_integrity(self) -> None:
        """Raises AssertionError unless pools, tree and tables agree."""
        super().check_integrity()
        pools = self._slots.pools
        pools.check_integrity()
        for handle in self._tree.handles():
            assert TREE in pools[handle.kind].holders(handle), f"{handle} is nobody's"
        for reservation in self._writers:
            for handle in reservation.slots.values():
                owners = pools[handle.kind].holders(handle)
                assert owners == (reservation.holder,), f"{handle} has owners {owners}"
        for kind, counts in self.statistics().kinds.items():
            assert counts.leaving >= 0, f"{kind}: more resident and reserved than leased"
