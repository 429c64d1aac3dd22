"""Plans a prefetch from slower tiers into the host tier: first the units there, then their room.

keys        k0 k1 k2 k3 k4 k5 k6 k7
host        ####### s                       before = 3: a resume set is there
storage             ######### s     s       asked = 8: with it, one would be there
room for 3 pages    ######### s             granted = 6: the deepest resume point that fits

Room is reserved once the units of the slower tiers are known. If eviction cannot free enough,
the prefetch shrinks to a shallower resume point, as long as it gains `threshold_tokens`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ferryman.cache.manifest import Kind
from ferryman.cache.units import Tier
from ferryman.errors import QueueFull
from ferryman.tiers.layout import ArenaLayout
from ferryman.tiers.prefetch_values import PrefetchRequest, PrefetchShortfall
from ferryman.tiers.store import HostStore
from ferryman.tiers.unit_group import (
    Group,
    GroupChoice,
    Room,
    RoomPolicy,
    WriteOffer,
    by_kind,
    demand_of,
)
from ferryman.tiers.values import ReservedUnit, ReserveRequest, UnitName, WorkerLife


@dataclass(frozen=True, slots=True)
class PrefetchSource:
    """The pages that one slower tier holds of a chain, by kind. `name` tells peers apart."""

    tier: Tier
    name: str
    pages: Mapping[Kind, Sequence[int]]

    def names(self) -> frozenset[UnitName]:
        """All its units."""
        return frozenset((kind, page) for kind, pages in self.pages.items() for page in pages)


@dataclass(frozen=True, slots=True)
class RoomLimits:
    """Resume points at page `floor` or before gain too little. A prefetch takes `max_bytes` at
    most."""

    floor: int
    max_bytes: int
    layout: ArenaLayout

    def may_fit(self, offer: WriteOffer, depth: int) -> bool:
        """Whether the full pages before page `depth` alone are few enough bytes."""
        if Kind.FULL not in self.layout.regions:
            return True
        most = self.max_bytes // self.layout.slot_bytes(Kind.FULL)
        return offer.may_fit(depth, lambda: {Kind.FULL: most})

    def fits(self, group: Group) -> bool:
        return bool(group) and group_bytes(group, self.layout) <= self.max_bytes


@dataclass(frozen=True, slots=True)
class Truncate:
    """The deepest resume point that fits, with a second one half-way as a fallback if both fit."""

    limits: RoomLimits

    def choices(self, offer: WriteOffer, room: Room) -> Iterator[GroupChoice]:
        floor = self.limits.floor
        points = [depth for depth in offer.points() if depth > floor]
        rising = points[::-1]
        for depth in points:
            if not self._may_be_chosen(offer, depth, room):
                continue
            at = bisect_right(rising, floor + (depth - floor) // 2)
            least, below = offer.minimal(depth), offer.minimal(rising[at - 1]) if at else ()
            both = tuple(sorted({*least, *below}))
            groups = (both, least) if len(both) > len(least) else (least,)
            yield from (GroupChoice(group, depth) for group in groups if self.limits.fits(group))

    def _may_be_chosen(self, offer: WriteOffer, depth: int, room: Room) -> bool:
        """Checked anew for each point: eviction for a deeper point may have removed units this one
        needs."""
        may_fit = offer.may_fit(depth, room) and self.limits.may_fit(offer, depth)
        return may_fit and offer.is_point(depth)


RoomPolicyOf = Callable[[RoomLimits], RoomPolicy]


@dataclass(frozen=True, slots=True)
class PrefetchGrant:
    """The part of a prefetch that got room. `before` to `granted` as in `Prefetched`; `room` is
    reserved.

    `lack` says why granted is less than asked, and `lacking` how many units got no room; both are
    empty when granted equals asked.
    """

    before: int
    asked: int
    granted: int
    lack: PrefetchShortfall | None
    room: tuple[ReservedUnit, ...]
    lacking: Mapping[Kind, int] = field(default_factory=dict)

    @property
    def names(self) -> Group:
        return tuple((unit.kind, unit.page_index) for unit in self.room)

    @property
    def num_bytes(self) -> int:
        return sum(unit.num_bytes for unit in self.room)


@dataclass(frozen=True, slots=True)
class PrefetchPlanner:
    """Asks for room in the name of `worker`, the host-cache itself.

    At most `share` of the arena's bytes are being prefetched at once.
    """

    worker: WorkerLife
    policy: RoomPolicyOf
    share: float

    def _options(self, store: HostStore, ask: PrefetchRequest, offer: WriteOffer) -> PrefetchGrant:
        """The grant if the offered units had room. Changes nothing."""
        keys = ask.keys[: ask.max_pages]
        before = store.usable_pages(keys)
        asked = max(before, next(offer.points(), 0))
        gain = (asked - max(before, ask.have_pages)) * store.manifest.page_size
        is_wanted = gain >= max(1, ask.threshold_tokens)
        lack = None if is_wanted or gain <= 0 else PrefetchShortfall.BELOW_THRESHOLD
        return PrefetchGrant(before, asked, asked if is_wanted else before, lack, ())

    def reserve(
        self,
        store: HostStore,
        ask: PrefetchRequest,
        sources: Sequence[PrefetchSource],
        *,
        lease_id: str,
        bytes_under_way: int,
        now: float,
    ) -> PrefetchGrant:
        """Reserves room under `lease_id` for units worth a prefetch; otherwise makes no
        reservation."""
        writing = ReserveRequest(lease_id, self.worker, ask.keys[: ask.max_pages], offered(sources))
        offer = store.offer(writing.keys, writing.units)
        wish = self._options(store, ask, offer)
        if wish.granted == wish.before:
            return wish
        limits, wanted = self._limits(store, ask, wish, bytes_under_way), offer.minimal(wish.asked)
        try:
            room = store.reserve(writing, now, room=self.policy(limits))
        except QueueFull:
            lacking = demand_of(wanted)
            return PrefetchGrant(
                wish.before, wish.asked, wish.before, PrefetchShortfall.RATE_LIMITED, (), lacking
            )
        names = tuple((unit.kind, unit.page_index) for unit in room)
        reach = next(store.offer(writing.keys, by_kind(names)).points(), 0)
        granted = max(wish.before, reach)
        if granted >= wish.asked:
            return PrefetchGrant(wish.before, wish.asked, granted, None, room)
        is_slow = limits.max_bytes < group_bytes(wanted, store.layout) <= arena_bytes(store.layout)
        lack = PrefetchShortfall.RATE_LIMITED if is_slow else PrefetchShortfall.HOST_FULL
        lacking = demand_of(tuple(set(wanted).difference(names)))
        return PrefetchGrant(wish.before, wish.asked, granted, lack, room, lacking)

    def _limits(
        self, store: HostStore, ask: PrefetchRequest, wish: PrefetchGrant, bytes_under_way: int
    ) -> RoomLimits:
        layout, page_size = store.layout, store.manifest.page_size
        have = max(wish.before, ask.have_pages)
        floor = have + max(0, -(-ask.threshold_tokens // page_size) - 1)
        return RoomLimits(floor, int(arena_bytes(layout) * self.share) - bytes_under_way, layout)


def offered(sources: Sequence[PrefetchSource]) -> dict[Kind, tuple[int, ...]]:
    """The units that at least one source holds."""
    return by_kind(name for source in sources for name in source.names())


def arena_bytes(layout: ArenaLayout) -> int:
    """The bytes of all slots of all kinds."""
    return sum(layout.slot_bytes(kind) * count for kind, count in layout.num_slots.items())


def group_bytes(group: Sequence[UnitName], layout: ArenaLayout) -> int:
    return sum(layout.slot_bytes(kind) for kind, _ in group)


def in_order(names: Sequence[UnitName]) -> tuple[UnitName, ...]:
    """The order of transfer: units that complete an earlier resume point come first.

    A full page is due at its own index. A window page or a snapshot is due at the page of the first
    snapshot at or after it, because no resume needs it earlier.
    """
    ends = sorted(page for kind, page in names if kind is Kind.RECURRENT)

    def due(name: UnitName) -> tuple[int, int, UnitName]:
        kind, page = name
        if kind is Kind.FULL:
            return page, 0, name
        at = bisect_left(ends, page)
        return ends[at] if at < len(ends) else page, 1, name

    return tuple(sorted(names, key=due))
