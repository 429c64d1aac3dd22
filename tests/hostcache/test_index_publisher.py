"""A host-cache that holds much, or was away, publishes its units to the index in few calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from tests.doubles.memory_index import MemoryIndex
from tests.tiers.state_shapes import chain
from tests.tiers.test_store import put, store_with

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.cache.units import Tier
from ferryman.tiers.values import UnitForgotten, UnitStored
from ferryman.wire.redis.bucket_folders import BucketFolder
from ferryman.wire.redis.index import FolderClaim, IndexedUnit, IndexStatistics, NodeLife
from ferryman_hostcache import index_publisher as module
from ferryman_hostcache.index_publisher import IndexPublisher

NODE = NodeLife("node", 7)


def stored(keys: Sequence[PageKey]) -> list[UnitStored]:
    return [UnitStored(Kind.FULL, key, keys[0], 1, b"d" * 16, 1) for key in keys]


class SlowIndex(MemoryIndex):
    """Counts calls, and lets something else happen during each."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []
        self.keys: set[PageKey] = set()

    async def commit(
        self, node: NodeLife, root: PageKey, tier: Tier, units: Sequence[IndexedUnit]
    ) -> None:
        self.calls.append(len(units))
        self.keys.update(unit.key for unit in units)
        during_calls()
        await super().commit(node, root, tier, units)


def during_calls() -> None:
    """Nothing; a test says what."""


async def announced(publisher: IndexPublisher) -> None:
    running = asyncio.create_task(publisher.run())
    async with asyncio.timeout(120):
        await publisher.flushed()
    publisher.stop()
    await running


async def test_more_than_may_wait_is_announced_while_more_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each change during an announcement once restarted it, so late units were never published."""
    monkeypatch.setattr(module, "MAX_WAITING", 8)
    monkeypatch.setattr(module, "BATCH", 4)
    index = SlowIndex()
    held = stored(chain(*range(1, 41)))
    later = iter(stored(chain(*range(101, 121))))
    publisher = IndexPublisher(index, NODE, lambda: held, clock=lambda: 0.0)

    def another() -> None:
        if change := next(later, None):
            held.append(change)
            publisher.publish([change])

    monkeypatch.setattr(f"{__name__}.during_calls", another)
    await announced(publisher)
    assert index.keys == {unit.key for unit in held}
    assert publisher.statistics().num_refreshes == 1


async def test_what_was_stored_together_is_announced_anew_in_one_call() -> None:
    """By depth, as the tree lists it, units of all chains would alternate: a call for each."""
    index, store = SlowIndex(), store_with(full=50)
    for number in range(1, 6):
        put(store, chain(number, *range(200, 209)))
    await announced(IndexPublisher(index, NODE, store.holdings, clock=lambda: 0.0))
    assert index.calls == [10] * 5


async def test_what_goes_while_all_is_announced_anew_is_not_left_in_the_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "BATCH", 4)
    index, store = SlowIndex(), store_with(full=20)
    keys = chain(*range(1, 13))
    put(store, keys)
    store.drain_effects()
    publisher = IndexPublisher(index, NODE, store.holdings, clock=lambda: 0.0)

    def drop() -> None:
        store.drop_corrupt(Kind.FULL, keys[2])
        publisher.publish(
            e for e in store.drain_effects() if isinstance(e, UnitStored | UnitForgotten)
        )

    monkeypatch.setattr(f"{__name__}.during_calls", drop)
    await announced(publisher)
    said = await index.digests(NODE, keys[0], [(Kind.FULL, key) for key in keys])
    assert {key for _, key in said} == set(keys[:2])


async def test_what_goes_while_it_waits_to_be_announced_anew_is_not_left_there_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "BATCH", 4)
    index, store = SlowIndex(), store_with(full=20)
    prompts = [chain(number) for number in range(1, 7)]
    for keys in prompts:
        put(store, keys)
    store.drain_effects()
    publisher = IndexPublisher(index, NODE, store.holdings, clock=lambda: 0.0)

    def drop() -> None:
        for keys in prompts[2], prompts[5]:
            store.drop_corrupt(Kind.FULL, keys[0])
        publisher.publish(
            e for e in store.drain_effects() if isinstance(e, UnitStored | UnitForgotten)
        )

    monkeypatch.setattr(f"{__name__}.during_calls", drop)
    await announced(publisher)
    for number, (key,) in enumerate(prompts):
        said = await index.digests(NODE, key, [(Kind.FULL, key)])
        assert bool(said) == (number not in (2, 5)), number


class LossyIndex(MemoryIndex):
    """Loses calls in its own ways, and says so as the one over Redis does: `num_dropping` calls are
    dropped and counted, `num_failing` are not answered, whereupon it is away until the next beat.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_dropping = self.num_failing = self.num_dropped = self.num_failed = 0
        self.announcements: list[asyncio.Event] = []

    async def announce(self, node: NodeLife, ttl_seconds: float) -> bool:
        self.is_away = False
        was_known = await super().announce(node, ttl_seconds)
        for event in self.announcements:
            event.set()
        return was_known

    async def commit(
        self, node: NodeLife, root: PageKey, tier: Tier, units: Sequence[IndexedUnit]
    ) -> None:
        if not self._is_lost():
            await super().commit(node, root, tier, units)

    async def forget(
        self, node: NodeLife, root: PageKey, tier: Tier, units: Sequence[tuple[Kind, PageKey]]
    ) -> None:
        if not self._is_lost():
            await super().forget(node, root, tier, units)

    def _is_lost(self) -> bool:
        if self.num_dropping:
            self.num_dropping, self.num_dropped = self.num_dropping - 1, self.num_dropped + 1
            return True
        if self.num_failing:
            self.num_failing, self.num_failed = self.num_failing - 1, self.num_failed + 1
            self.is_away = True
        return self.is_away

    def flush(self) -> None:
        """As an operator's FLUSHALL."""
        self._held.clear()
        self._ends.clear()

    def statistics(self) -> IndexStatistics:
        return replace(super().statistics(), num_dropped=self.num_dropped)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.01)


@asynccontextmanager
async def announcing(index: LossyIndex, held: list[UnitStored]) -> AsyncIterator[IndexPublisher]:
    publisher = IndexPublisher(index, NODE, lambda: held, clock=lambda: 0.0)
    running = asyncio.create_task(publisher.run())
    try:
        yield publisher
    finally:
        publisher.stop()
        await running


async def beaten(index: LossyIndex, times: int = 2) -> None:
    """Until the announcer has come round again."""
    for _ in range(times):
        index.announcements.append(event := asyncio.Event())
        await event.wait()
        index.announcements.remove(event)


async def known(index: LossyIndex, held: Sequence[UnitStored]) -> set[PageKey]:
    names = [(Kind.FULL, unit.key) for unit in held]
    return {key for _, key in await index.digests(NODE, held[0].root, names)}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("loss", ["dropped", "failed", "flushed"])
async def test_what_an_index_lost_is_told_again_though_nothing_is_new(loss: str) -> None:
    index, held = LossyIndex(), list[UnitStored]()
    async with asyncio.timeout(120), announcing(index, held) as publisher:
        await beaten(index)
        assert publisher.statistics().num_refreshes == 1, "of nothing, in the beginning"
        held += stored(chain(*range(1, 9)))
        if loss == "dropped":
            index.num_dropping = 1
        elif loss == "failed":
            index.num_failing = 1
        publisher.publish(held)
        if loss == "flushed":
            await publisher.flushed()
            index.flush()
        while await known(index, held) != {unit.key for unit in held}:
            await beaten(index)
        await until_refreshed(index, publisher, 2)
        assert (index.num_dropped, index.num_failed) == (loss == "dropped", loss == "failed")


async def until_refreshed(index: LossyIndex, publisher: IndexPublisher, times: int) -> None:
    while publisher.statistics().num_refreshes < times:
        await beaten(index)


@pytest.mark.usefixtures("quick")
async def test_an_index_that_lost_nothing_is_told_once() -> None:
    index, held = LossyIndex(), stored(chain(*range(1, 9)))
    async with asyncio.timeout(120), announcing(index, held) as publisher:
        await beaten(index)
        before = publisher.statistics().num_refreshes
        await beaten(index, 5)
        assert publisher.statistics().num_refreshes == before


async def told_of(index: LossyIndex, owner: NodeLife, held: Sequence[UnitStored]) -> int:
    names = [(Kind.FULL, unit.key) for unit in held]
    return len(await index.stored_units(owner, held[0].root, names))


@pytest.mark.usefixtures("quick")
async def test_units_in_storage_are_a_folders_too_until_it_has_a_later_owner() -> None:
    """Before the holdings are known, what a former owner announced stands."""
    index, folder = LossyIndex(), BucketFolder("0" * 16, "node")
    held = [replace(unit, tier=Tier.STORAGE) for unit in stored(chain(*range(1, 5)))]
    mine, next_owners = folder.life(1), folder.life(2)
    async with asyncio.timeout(120), announcing(index, held) as publisher:
        publisher.share(mine)
        publisher.publish(held[:2])
        await publisher.flushed()
        assert await told_of(index, NODE, held) >= 2
        assert await told_of(index, mine, held) == 0
        publisher.on_holdings()
        while await told_of(index, mine, held) < len(held):
            await beaten(index)
        gone = [UnitForgotten(unit.kind, unit.key, unit.root, unit.tier) for unit in held[3:]]
        del held[3:]
        publisher.publish(gone)
        await publisher.flushed()
        assert await told_of(index, mine, [*held]) == await told_of(index, NODE, held) == 3
        assert await index.claim(next_owners, 60.0) is FolderClaim.NEW
        await beaten(index)
        late = replace(held[0], key=chain(9)[0], root=chain(9)[0])
        publisher.publish([late])
        await publisher.flushed()
        assert await told_of(index, NODE, [late]) == 1
        assert await told_of(index, mine, [late]) == 0
        assert await index.claim(next_owners, 60.0) is FolderClaim.KNOWN
