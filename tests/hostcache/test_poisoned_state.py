"""NaN in cached state, with a real model: the next attempt computes anew and answers exactly.

The state is in no tier any more by then, and the worker is not blamed. It is spoilt where it lies:
in a slot of a worker's tree, and in the arena, with the digest of just these bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.engine.host_fed import PAGE_SIZE, Cell, engine
from tests.harness.pair import (
    PairWorker,
    WorkerPair,
    check,
    pair_of_engines,
    worker_options,
)
from tests.hostcache.attached import source_of, worker_at
from tests.tiny_models import save_tiny_model
from tests.waiting import until
from tests.worker.test_hand_off_of_families import GREEDY, PROMPT

from ferryman.cache.keys import as_token_ids, page_keys, root_key
from ferryman.cache.manifest import Kind
from ferryman.engine.engine import Engine, build_engine
from ferryman.errors import CorruptState, NonFiniteState
from ferryman.llm import Completion
from ferryman.schedule.events import Event
from ferryman.schedule.request import Request
from ferryman.tiers.prefetch_values import DEFAULT_WISH
from ferryman.tiers.write_policy import write_policy_named
from ferryman.wire.grpc.status import error_of
from ferryman.wire.hostcache.attachment import HostCacheOptions
from ferryman.wire.hostcache.client import HostCacheClient, host_cache_client
from ferryman.wire.values import Failure
from ferryman.worker.host import host_tier_of
from ferryman.worker.numeric_watch import NumericCounts, NumericWatch
from ferryman.worker.worker_app import WorkerContext
from ferryman_decode.server import DecodeServicer
from ferryman_hostcache.service import RunningHostCache
from ferryman_prefill.server import PrefillServicer

NUM_PAGES = len(PROMPT) // PAGE_SIZE


@dataclass(frozen=True)
class Served:
    """A model, and what it answers cold."""

    folder: Path
    cold: Completion


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = save_tiny_model(tmp_path_factory.mktemp("bamba"), "bamba")
    with engine(folder, Cell(1024, overlap=False, prefix_cache=False)) as llm:
        yield Served(folder, llm.generate([PROMPT], GREEDY)[0])


def no_drain() -> None:
    raise AssertionError("a sound worker is taken out")


class WatchedPrefill(PrefillServicer):
    """Fails if it is taken out; reports cache changes after events, as the worker loop does."""

    def __init__(self, parts: WorkerContext) -> None:
        self.watch = NumericWatch(parts.worker_id, no_drain)
        super().__init__(replace(parts, numeric_watch=self.watch))

    def on_events(self, events: list[Event]) -> None:
        super().on_events(events)
        self._ctx.host.changed(self._ctx.engine.scheduler.take_cache_changes())


class WatchedDecode(DecodeServicer):
    """As `WatchedPrefill`."""

    def __init__(self, parts: WorkerContext) -> None:
        self.watch = NumericWatch(parts.worker_id, no_drain)
        super().__init__(replace(parts, numeric_watch=self.watch))


@dataclass(frozen=True)
class Setting:
    """Two workers, and the host-cache that the prefill worker writes to and loads from."""

    pair: WorkerPair
    host_cache: RunningHostCache
    client: HostCacheClient

    def request(self, name: str) -> Request:
        manifest, ids = self.pair.decode.engine.manifest, as_token_ids(PROMPT)
        keys = page_keys(root_key(manifest), ids, manifest.page_size)
        return Request(name, ids, keys, GREEDY)

    async def hand_off(self, name: str, attempt: int = 1) -> None:
        await self.pair.run_prefill(self.pair.order(self.request(name), attempt))

    def where_prefill_resumed(self) -> int:
        return int(str(self.pair.prefill.facts("admitted")[-1]["position"]))

    def in_tree(self, worker: PairWorker) -> int:
        return worker.engine.scheduler.allocator.tree.match_depth(self.request("any").keys)

    def in_host(self) -> int:
        return self.host_cache.host.store.lookup(self.request("any").keys).usable_pages

    async def until_written(self) -> None:
        await until(lambda: self.in_host() == NUM_PAGES)


@asynccontextmanager
async def setting(served: Served, host_cache: RunningHostCache) -> AsyncIterator[Setting]:
    with (
        build_engine(worker_options(served.folder, 32, 1)) as for_prefill,
        build_engine(worker_options(served.folder, 64, 1)) as for_decode,
    ):

        async def attach(arena: memoryview) -> None:
            tier = for_prefill.host_tier
            await asyncio.wrap_future(for_prefill.stream.call(lambda: tier.attach(arena)))

        asked = HostCacheOptions(host_cache.address, "prefill-00000001", 7, call_seconds=10.0)
        policy = write_policy_named("write_through")
        async with (
            host_cache_client(asked, for_prefill.manifest, attach) as client,
            host_tier_of(for_prefill, client, policy, DEFAULT_WISH, lambda: None) as tier,
            pair_of_engines(
                for_prefill,
                for_decode,
                make_prefill=lambda parts: WatchedPrefill(replace(parts, host=tier)),
                make_decode=WatchedDecode,
            ) as pair,
        ):
            await client.attachment.attached()
            yield Setting(pair, host_cache, client)
            await until(lambda: not pair.leased())
            for worker in (pair.prefill, pair.decode):
                worker.engine.scheduler.check_integrity()


def poison(engine: Engine, request: Request, kind: Kind) -> None:
    """The last unit of a kind on the request's chain becomes NaN, in the tree's own slot."""
    tree = engine.scheduler.allocator.tree
    keys = [key for key in request.keys if tree.has(kind, key)]
    content = engine.transfer.read(kind, tree.slot(kind, keys[-1]).slot)
    content[:] = b"\xff" * len(content)
    assert set(engine.transfer.read(kind, tree.slot(kind, keys[-1]).slot)) == {0xFF}


@pytest.mark.parametrize("kind", [Kind.FULL, Kind.RECURRENT], ids=str)
async def test_nan_in_the_tree_of_prefill(
    kind: Kind, served: Served, host_cache: RunningHostCache
) -> None:
    async with setting(served, host_cache) as here:
        await here.hand_off("first")
        await check(here.pair, "first", served.cold)
        await here.until_written()
        poison(here.pair.prefill.engine, here.request("first"), kind)
        with pytest.raises(NonFiniteState, match="behind position 74"):
            await here.hand_off("second")
        assert here.where_prefill_resumed() > 0, "it resumed from what is NaN"
        assert here.in_tree(here.pair.prefill) == 0
        await here.client.attachment.released()
        assert here.in_host() == 0
        await here.pair.run_prefill(here.pair.order(here.request("second"), attempt=2))
        assert here.where_prefill_resumed() == 0
        answer, _ = await here.pair.read_answer("second", attempt=2)
        assert tuple(answer.token_ids) == served.cold.token_ids
        assert here.pair.prefill.service.watch.statistics() == NumericCounts(0, 1)
        await here.until_written()
        await here.hand_off("third")
        assert here.where_prefill_resumed() > 0, "sound state is cached in its place"
        await check(here.pair, "third", served.cold)


async def test_nan_in_the_arena(served: Served, host_cache: RunningHostCache) -> None:
    """Another worker of the node wrote it there, under a digest that is right."""
    async with setting(served, host_cache) as here:
        manifest, keys = here.pair.prefill.engine.manifest, here.request("any").keys
        names = [(Kind.FULL, page) for page in range(NUM_PAGES)] + [(Kind.RECURRENT, NUM_PAGES - 1)]
        nan = [source_of(k, page, b"\xff" * manifest.layout(k).slot_bytes) for k, page in names]
        async with worker_at(host_cache.address, manifest, "prefill-00000002") as other:
            assert await other.client.store(keys, nan) == len(names)
        here.pair.prefill.engine.scheduler.set_costs(
            replace(
                here.pair.prefill.engine.scheduler.admission.planner.costs,
                load_seconds_per_byte=0.0,
            )
        )
        with pytest.raises(NonFiniteState):
            await here.hand_off("first")
        assert here.pair.prefill.facts("admitted")[-1]["cached"] == {"host": NUM_PAGES * PAGE_SIZE}
        assert here.in_tree(here.pair.prefill) == 0
        await here.client.attachment.released()
        assert here.in_host() == 0
        await here.hand_off("first", attempt=2)
        assert here.where_prefill_resumed() == 0
        answer, _ = await here.pair.read_answer("first", attempt=2)
        assert tuple(answer.token_ids) == served.cold.token_ids
        assert here.pair.prefill.service.watch.statistics() == NumericCounts(0, 1)


async def test_nan_in_the_tree_of_decode(served: Served, host_cache: RunningHostCache) -> None:
    async with setting(served, host_cache) as here:
        await here.hand_off("first")
        await check(here.pair, "first", served.cold)
        decode = here.pair.decode
        poison(decode.engine, here.request("first"), Kind.FULL)
        await here.hand_off("second")
        _, last = await here.pair.read_answer("second")
        assert isinstance(last.ending, Failure)
        error = error_of(last.ending)
        assert isinstance(error, NonFiniteState)
        assert isinstance(error, CorruptState), "the router computes it anew"
        assert here.in_tree(decode) == 0
        await here.hand_off("second", attempt=2)
        answer, _ = await here.pair.read_answer("second", attempt=2)
        assert tuple(answer.token_ids) == served.cold.token_ids
        assert decode.service.watch.statistics() == NumericCounts(0, 1)
