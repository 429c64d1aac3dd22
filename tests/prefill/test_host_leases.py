"""A lease on the host tier lasts while what it grants is loaded: no shorter, and no longer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from tests.engine.host_fed import HostMemory
from tests.harness.pair import WorkerPair, expected, pair_of_workers, request
from tests.waiting import until

from ferryman.schedule.request import Request
from ferryman.tiers.prefetch_values import NOTHING_BROUGHT, Prefetched
from ferryman.wire.grpc.rpc import CallTags
from ferryman.wire.hostcache.client import HostLease
from ferryman.worker.host import NoHostTier
from ferryman.worker.worker_app import WorkerContext
from ferryman_prefill.server import PrefillServicer

SHARED = [5] * 20  # five pages, of which the host has the state
LONGER = request("longer", SHARED + [6] * 24)  # three chunks more
OTHER = request("other", [7] * 9)


class GrantingHost(NoHostTier):
    """Grants what is in memory, and notes how many chunks were done when each lease ended."""

    def __init__(self) -> None:
        self.memory = HostMemory()
        self.granted: list[str] = []
        self.released: list[tuple[str, int]] = []
        self.num_chunks: Callable[[], int] = lambda: 0

    async def lease_for(
        self, request: Request, tags: CallTags, brought: Prefetched = NOTHING_BROUGHT
    ) -> HostLease:
        view = self.memory.view(request.keys)
        self.granted.append(tags.request_id)
        return HostLease(tags.request_id, 1, len(view.units), view)

    def release(self, lease: HostLease, *, was_corrupt: bool = False) -> None:
        assert not was_corrupt
        self.released.append((lease.lease_id, self.num_chunks()))


def _put_into_host(pair: WorkerPair, host: GrantingHost, asked: Request) -> None:
    """Moves a prompt's units from the device to the host."""
    engine = pair.prefill.engine
    for unit in engine.scheduler.chain_units(asked.keys):
        content = bytes(engine.transfer.read(unit.kind, unit.handle.slot))
        host.memory.put(unit.kind, unit.page_index, unit.key, content)
    engine.host_tier.attach(memoryview(bytes(host.memory.arena)))
    assert engine.scheduler.flush() > 0


async def test_a_lease_ends_with_its_loads_and_not_with_the_prompt() -> None:
    host = GrantingHost()

    def make_prefill(parts: WorkerContext) -> PrefillServicer:
        return PrefillServicer(replace(parts, host=host))

    async with pair_of_workers(make_prefill=make_prefill) as pair:
        first = request("first", [*SHARED, 5])
        await pair.run_prefill(pair.order(first))
        await pair.read_tokens("first")
        await until(lambda: not pair.leased())
        assert [name for name, _ in host.released] == ["first"]
        _put_into_host(pair, host, first)

        before = len(pair.prefill.facts("chunk"))
        host.num_chunks = lambda: len(pair.prefill.facts("chunk")) - before
        pair.prefill.hold()
        running = asyncio.ensure_future(pair.run_prefill(pair.order(LONGER)))
        await until(lambda: len(pair.prefill.facts("admitted")) == 2)
        plan = pair.prefill.facts("admitted")[-1]
        assert host.released[1:] == [], "its loads have not been awaited yet"
        pair.prefill.go_on()
        await running
        tokens, _ = await pair.read_tokens("longer")
        assert tokens == expected(LONGER)
        assert plan["position"] == len(SHARED), f"it was to be loaded: {plan}"
        assert host.num_chunks() == 3
        ((name, num_chunks),) = host.released[1:]
        assert name == "longer"
        assert num_chunks <= 1, "the lease ended with the loads, which the first chunk waits for"


async def test_a_lease_ends_with_an_attempt_that_ends_before_its_loads() -> None:
    host = GrantingHost()

    def make_prefill(parts: WorkerContext) -> PrefillServicer:
        return PrefillServicer(replace(parts, host=host))

    async with pair_of_workers(make_prefill=make_prefill) as pair:
        pair.prefill.hold()
        running = asyncio.ensure_future(pair.run_prefill(pair.order(OTHER)))
        await until(lambda: host.granted == ["other"])
        await until(lambda: len(pair.prefill.facts("admitted")) == 1)
        assert host.released == []
        running.cancel()
        await until(lambda: host.released == [("other", 0)])
        pair.prefill.go_on()
        await until(lambda: not pair.leased())
        assert host.released == [("other", 0)], "once"
