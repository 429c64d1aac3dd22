"""Rows 35, 47 and 48 of the catalogue: slots that a load writes or a copy to the host reads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext

import pytest
from tests.harness.pair import StampedPair, engine_of
from tests.harness.schedule import ALL_KINDS, HYBRID, WatchedWorker, books, host_of, request

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.errors import Unavailable
from ferryman.schedule.events import Cached
from ferryman.schedule.request import Request
from ferryman.tiers.prefetch_values import NOTHING_BROUGHT, Prefetched
from ferryman.tiers.write_policy import write_policy_named
from ferryman.wire.grpc.rpc import NO_TAGS, CallTags
from ferryman.wire.hostcache.arena_copy import UnitSource
from ferryman.wire.hostcache.client import HostLease
from ferryman.wire.hostcache.copy_pace import ALL_AT_ONCE, CopyPace, StepPace
from ferryman.worker.backup import DeviceBackup
from ferryman.worker.host import NoHostTier

# Row 35: what a load is still writing is not sent.


class HostOfOne(NoHostTier):
    """Grants what another worker wrote through."""

    def __init__(self, how: str) -> None:
        self._how = how
        self.releases: list[bool] = []

    async def lease_for(
        self, request: Request, tags: CallTags, brought: Prefetched = NOTHING_BROUGHT
    ) -> HostLease:
        return HostLease("lease", 1, 0, host_of("all kinds").view(request.keys, self._how))

    def release(self, lease: HostLease, *, was_corrupt: bool = False) -> None:
        self.releases.append(was_corrupt)


@pytest.mark.parametrize("how", ["host", "corrupt"])
@pytest.mark.parametrize("tail", [1, 6, 20])
async def test_row_35_pages_that_a_load_is_writing_are_not_sent_before_it_is_done(
    pair: StampedPair, tail: int, how: str
) -> None:
    """The attempt learns of its admission before the step with the loads has run."""
    pair.prefill.engine.host_tier.attach(memoryview(bytes(host_of("all kinds").arena)))
    asked = request(ALL_KINDS, "r0", [1] * 17 + [2] * tail, 3)
    attempt, side = pair.attempt(asked, host := HostOfOne(how))
    running = asyncio.create_task(attempt.run(0))
    await pair.settle()
    pair.prefill.plan()
    await pair.settle()
    (step,) = pair.prefill.queued
    assert step.ops.loads, "a load is under way"
    assert side.offered == [], "and nothing of it is offered"
    for _ in range(20):
        await pair.step()
    await running
    for unit, content in side.offered:
        assert bytes(unit.content) == content, f"{unit.unit} changed after it was offered"
    assert host.releases[0] is (how == "corrupt")
    pair.decode.drain()
    assert pair.decode.tokens[attempt.name] == pair.decode.expected(attempt.name)


async def test_row_35_a_device_prefix_below_a_load_goes_early(pair: StampedPair) -> None:
    """Units in the tree were computed earlier: they are offered on admission. Loads are not."""
    pair.prefill.engine.host_tier.attach(memoryview(bytes(host_of("all kinds").arena)))
    pair.prefill.submit(request(ALL_KINDS, "warm", [1] * 6, 1))
    pair.prefill.drain()
    attempt, side = pair.attempt(request(ALL_KINDS, "r0", [1] * 17 + [2] * 6, 3), HostOfOne("host"))
    running = asyncio.create_task(attempt.run(0))
    await pair.settle()
    pair.prefill.plan()
    await pair.settle()
    (step,) = pair.prefill.queued
    loading = {(load.unit.kind, load.unit.page_index) for load in step.ops.loads}
    assert loading
    assert [unit.unit.name for unit, _ in side.offered] == [(Kind.FULL, 0)]
    for _ in range(20):
        await pair.step()
    await running
    pair.decode.drain()
    assert pair.decode.tokens[attempt.name] == pair.decode.expected(attempt.name)


# Row 47 (and 48): a page that is being copied out stays as it is until the copy has ended.


class SlowHost:
    """A host-cache whose stores wait for the test, and then copy or fail."""

    node_id, num_attaches, num_times_usable = "local", 1, 1

    def __init__(self) -> None:
        self.may_go_on = asyncio.Event()
        self.is_away = False
        self.stored: dict[tuple[Kind, int], bytes] = {}

    async def store(
        self,
        keys: Sequence[PageKey],
        units: Sequence[UnitSource],
        *,
        tags: CallTags = NO_TAGS,
        pace: CopyPace = ALL_AT_ONCE,
    ) -> int:
        await self.may_go_on.wait()
        if self.is_away:
            raise Unavailable("the host-cache is away")
        for unit in units:
            room = bytearray(HYBRID.layout(unit.kind).slot_bytes)
            unit.copy(memoryview(room))
            self.stored[unit.kind, unit.page_index] = bytes(room)
        return len(units)

    def drop_chain(self, first: PageKey) -> None:
        raise AssertionError("nothing here is without numbers")


@pytest.mark.parametrize("is_away", [False, True], ids=["copied", "host away"])
async def test_rows_47_and_48_a_slot_that_is_copied_out_is_not_reused_until_the_copy_ends(
    is_away: bool,
) -> None:
    worker = WatchedWorker(HYBRID, {Kind.FULL: 8, Kind.RECURRENT: 6})
    with engine_of(worker) as engine:
        client = SlowHost()
        client.is_away = is_away
        store_unit = engine.transfer.store_unit
        policy = write_policy_named("write_through")
        backup = DeviceBackup(
            engine.scheduler, store_unit, client, policy, lambda: None, StepPace()
        )
        worker.submit(request(HYBRID, "r0", [1] * 9, 1))
        worker.drain()
        units = [unit for event in worker.seen(Cached) for unit in event.units]
        held = {
            (unit.kind, unit.page_index): bytes(engine.transfer.read(unit.kind, unit.handle.slot))
            for unit in units
        }
        backup.added([(unit.kind, unit.key) for unit in units], NO_TAGS)
        writing = asyncio.create_task(backup.write_waiting())
        await asyncio.sleep(0)
        # Another prompt needs every slot there is, and gets those that are not being copied.
        worker.scheduler.flush()
        worker.submit(request(HYBRID, "r1", [2] * 15, 3))
        worker.drain()
        client.may_go_on.set()
        with pytest.raises(Unavailable) if is_away else nullcontext():
            await writing
        assert client.stored == ({} if is_away else held)
        worker.scheduler.flush()
        assert books(worker) == {}, "the copies have let go, and eviction goes on"
