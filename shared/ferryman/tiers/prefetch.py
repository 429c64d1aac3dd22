"""What to bring from slower tiers into the host tier: ask what is there, then make room for it.

keys        k0 k1 k2 k3 k4 k5 k6 k7
host        ####### s                       before = 3: a resume set is there
storage             ######### s     s       asked = 8: with it, one would be there
room for 3 pages    ######### s             granted = 6: the deepest resume point that fits

Room is reserved after it is known what there is to bring. Where eviction cannot make enough of it,
less is brought, down to a gain of `threshold_tokens`; and only what makes a resume point.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ferryman.cache.manifest import Kind
from ferryman.cache.units import Tier
from ferryman.errors import QueueFull
from ferryman.tiers.layout import ArenaLayout
from ferryman.tiers.prefetch_values import Lack, PrefetchAsk
from ferryman.tiers.room import Choice, Group, Offer, Room, RoomPolicy, by_kind, demand_of
from ferryman.tiers.store import HostStore
from ferryman.tiers.values import ReserveAsk, ReservedUnit, UnitName, WorkerLife


@dataclass(frozen=True, slots=True)
class Source:
    """What one slower tier holds of a chain: pages by kind. `name` tells peers apart."""

    tier: Tier
    name: str
    pages: Mapping[Kind, Sequence[int]]

    def names(self) -> frozenset[UnitName]:
        """All its units."""
        return frozenset((kind, page) for kind, pages in self.pages.items() for page in pages)


@dataclass(frozen=True, slots=True)
class RoomLimits:
    """Resume points at page `floor` or before gain too little; more than `max_bytes` at once are
    too much."""

    floor: int
    max_bytes: int
    layout: ArenaLayout

    def may_fit(self, offer: Offer, depth: int) -> bool:
        """Whether the full pages before page `depth` alone are few enough bytes."""
        if Kind.FULL not in self.layout.regions:
            return True
        most = self.max_bytes // self.layout.slot_bytes(Kind.FULL)
        return offer.may_fit(depth, lambda: {Kind.FULL: most})

    def fits(self, group: Group) -> bool:
        return bool(group) and group_bytes(group, self.layout) <= self.max_bytes


@dataclass(frozen=True, slots=True)
class Truncate:
    """The deepest resume point that fits, with one half-way to fall back on where that fits too."""

    limits: RoomLimits

    def choices(self, offer: Offer, room: Room) -> Iterator[Choice]:
        floor = self.limits.floor
        points = [depth for depth in offer.points() if depth > floor]
        rising = points[::-1]
        for depth in points:
            if not self._may_be_chosen(offer, depth, room):
                continue
            at = bisect_right(rising, floor + (depth - floor) // 2)
            least, below = offer.least(depth), offer.least(rising[at - 1]) if at else ()
            both = tuple(sorted({*least, *below}))
            groups = (both, least) if len(both) > len(least) else (least,)
            yield from (Choice(group, depth) for group in groups if self.limits.fits(group))

    def _may_be_chosen(self, offer: Offer, depth: int, room: Room) -> bool:
        """What was evicted for a deeper point may have been needed here."""
        may_fit = offer.may_fit(depth, room) and self.limits.may_fit(offer, depth)
        return may_fit and offer.is_point(depth)


@dataclass(frozen=True, slots=True)
class AllOrNothing:
    """The deepest resume point there is, or none: what truncation is measured against."""

    limits: RoomLimits

    def choices(self, offer: Offer, room: Room) -> Iterator[Choice]:
        depth = next(offer.points(), 0)
        if depth > self.limits.floor and self.limits.fits(least := offer.least(depth)):
            yield Choice(least, depth)


RoomPolicyOf = Callable[[RoomLimits], RoomPolicy]


@dataclass(frozen=True, slots=True)
class Grant:
    """What a prefetch may bring. `before` to `granted` as in `Prefetched`; `room` is reserved.

    `lack` says why granted is less than asked, and `lacking` how many units got no room; they are
    empty when it is not.
    """

    before: int
    asked: int
    granted: int
    lack: Lack | None
    room: tuple[ReservedUnit, ...]
    lacking: Mapping[Kind, int] = field(default_factory=dict)

    @property
    def names(self) -> Group:
        return tuple((unit.kind, unit.page_index) for unit in self.room)

    @property
    def num_bytes(self) -> int:
        return sum(unit.num_bytes for unit in self.room)


@dataclass(frozen=True, slots=True)
class Prefetcher:
    """Asks for room in the name of `worker`, the host-cache itself.

    At most `share` of the arena's bytes are on their way at once.
    """

    worker: WorkerLife
    policy: RoomPolicyOf
    share: float

    def _wish(self, store: HostStore, ask: PrefetchAsk, offer: Offer) -> Grant:
        """How far what there is to bring would reach; nothing is changed."""
        keys = ask.keys[: ask.max_pages]
        before = store.usable_pages(keys)
        asked = max(before, next(offer.points(), 0))
        gain = (asked - max(before, ask.have_pages)) * store.manifest.page_size
        is_wanted = gain >= max(1, ask.threshold_tokens)
        lack = None if is_wanted or gain <= 0 else Lack.BELOW_THRESHOLD
        return Grant(before, asked, asked if is_wanted else before, lack, ())

    def reserve(
        self,
        store: HostStore,
        ask: PrefetchAsk,
        sources: Sequence[Source],
        *,
        lease_id: str,
        bytes_under_way: int,
        now: float,
    ) -> Grant:
        """Room for what is worth bringing, under `lease_id`; if there is none, no reservation."""
        writing = ReserveAsk(lease_id, self.worker, ask.keys[: ask.max_pages], offered(sources))
        offer = store.offer(writing.keys, writing.units)
        wish = self._wish(store, ask, offer)
        if wish.granted == wish.before:
            return wish
        limits, wanted = self._limits(store, ask, wish, bytes_under_way), offer.least(wish.asked)
        try:
            room = store.reserve(writing, now, room=self.policy(limits))
        except QueueFull:
            lacking = demand_of(wanted)
            return Grant(wish.before, wish.asked, wish.before, Lack.RATE_LIMITED, (), lacking)
        names = tuple((unit.kind, unit.page_index) for unit in room)
        reach = next(store.offer(writing.keys, by_kind(names)).points(), 0)
        granted = max(wish.before, reach)
        if granted >= wish.asked:
            return Grant(wish.before, wish.asked, granted, None, room)
        is_slow = limits.max_bytes < group_bytes(wanted, store.layout) <= arena_bytes(store.layout)
        lack = Lack.RATE_LIMITED if is_slow else Lack.HOST_FULL
        lacking = demand_of(tuple(set(wanted).difference(names)))
        return Grant(wish.before, wish.asked, granted, lack, room, lacking)

    def _limits(
        self, store: HostStore, ask: PrefetchAsk, wish: Grant, bytes_under_way: int
    ) -> RoomLimits:
        layout, page_size = store.layout, store.manifest.page_size
        have = max(wish.before, ask.have_pages)
        floor = have + max(0, -(-ask.threshold_tokens // page_size) - 1)
        return RoomLimits(floor, int(arena_bytes(layout) * self.share) - bytes_under_way, layout)


def offered(sources: Sequence[Source]) -> dict[Kind, tuple[int, ...]]:
    """All that any of them holds."""
    return by_kind(name for each in sources for name in each.names())


def arena_bytes(layout: ArenaLayout) -> int:
    """Of all slots of all kinds."""
    return sum(layout.slot_bytes(kind) * count for kind, count in layout.num_slots.items())


def group_bytes(group: Sequence[UnitName], layout: ArenaLayout) -> int:
    return sum(layout.slot_bytes(kind) for kind, _ in group)


def in_order(names: Sequence[UnitName]) -> tuple[UnitName, ...]:
    """The order to bring units in: what completes an earlier resume point first.

    A full page counts where it is. A window page or a snapshot comes with the last page before it
    is of use: that of the first snapshot at its page or after it.
    """
    ends = sorted(page for kind, page in names if kind is Kind.RECURRENT)

    def due(name: UnitName) -> tuple[int, int, UnitName]:
        kind, page = name
        if kind is Kind.FULL:
            return page, 0, name
        at = bisect_left(ends, page)
        return ends[at] if at < len(ends) else page, 1, name

    return tuple(sorted(names, key=due))
