"""What the index hears of a host-cache that holds much, or was away, in how many calls."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from tests.tiers.state_shapes import chain
from tests.tiers.test_store import put, store_with

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.cache.units import Tier
from ferryman.tiers.values import EvictionRefused, UnitStored
from ferryman.wire.index import IndexedUnit, NodeLife
from ferryman.wire.memory_index import MemoryIndex
from ferryman_hostcache import announcer as module
from ferryman_hostcache.announcer import IndexAnnouncer

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


async def announced(announcer: IndexAnnouncer) -> None:
    running = asyncio.create_task(announcer.run())
    async with asyncio.timeout(20):
        await announcer.told()
    announcer.stop()
    await running


async def test_more_than_may_wait_is_announced_while_more_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every change during it began it anew, so what comes late in the order was never said."""
    monkeypatch.setattr(module, "MAX_WAITING", 8)
    monkeypatch.setattr(module, "BATCH", 4)
    index = SlowIndex()
    held = stored(chain(*range(1, 41)))
    later = iter(stored(chain(*range(101, 121))))
    announcer = IndexAnnouncer(index, NODE, lambda: held, clock=lambda: 0.0)

    def another() -> None:
        if change := next(later, None):
            held.append(change)
            announcer.tell([change])

    monkeypatch.setattr(f"{__name__}.during_calls", another)
    await announced(announcer)
    assert index.keys == {unit.key for unit in held}
    assert announcer.statistics().num_refreshes == 1


async def test_what_was_stored_together_is_announced_anew_in_one_call() -> None:
    """By depth, as the tree lists it, units of all chains would alternate: a call for each."""
    index, store = SlowIndex(), store_with(full=50)
    for number in range(1, 6):
        put(store, chain(number, *range(200, 209)))
    await announced(IndexAnnouncer(index, NODE, store.holdings, clock=lambda: 0.0))
    assert index.calls == [10] * 5


async def test_what_goes_while_all_is_announced_anew_is_not_left_in_the_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "BATCH", 4)
    index, store = SlowIndex(), store_with(full=20)
    keys = chain(*range(1, 13))
    put(store, keys)
    store.drain_effects()
    announcer = IndexAnnouncer(index, NODE, store.holdings, clock=lambda: 0.0)

    def drop() -> None:
        store.drop_corrupt(Kind.FULL, keys[2])
        announcer.tell(e for e in store.drain_effects() if not isinstance(e, EvictionRefused))

    monkeypatch.setattr(f"{__name__}.during_calls", drop)
    await announced(announcer)
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
    announcer = IndexAnnouncer(index, NODE, store.holdings, clock=lambda: 0.0)

    def drop() -> None:
        for keys in prompts[2], prompts[5]:
            store.drop_corrupt(Kind.FULL, keys[0])
        announcer.tell(e for e in store.drain_effects() if not isinstance(e, EvictionRefused))

    monkeypatch.setattr(f"{__name__}.during_calls", drop)
    await announced(announcer)
    for number, (key,) in enumerate(prompts):
        said = await index.digests(NODE, key, [(Kind.FULL, key)])
        assert bool(said) == (number not in (2, 5)), number
