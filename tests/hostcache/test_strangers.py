"""A process without the cluster's key is in the index, or between two nodes, with bytes of its own
that have the right digests: it is not asked, or its answer is refused."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import xxhash
from tests.cluster_keys import KEY, STRANGERS_KEY, key_file_in
from tests.hostcache.attached import AttachedTestWorker, StoredPrompt, prompt_of, worker_at
from tests.hostcache.conftest import StartHostCache
from tests.tiers.state_shapes import PAGE_SIZE, chain, manifest_of

from ferryman.cache.manifest import Kind
from ferryman.cache.units import Tier
from ferryman.tiers.prefetch_values import Prefetched, PrefetchOptions, PrefetchPolicy
from ferryman.wire.grpc.rpc import CallTags, Context, channel, listening
from ferryman.wire.redis.index import IndexedUnit, NodeLife
from ferryman.wire.redis.redis_index import redis_index
from ferryman.wire.v1 import hostcache_pb2 as pb
from ferryman.wire.v1 import hostcache_pb2_grpc as rpcs
from ferryman_hostcache.server import HostCacheServicer
from ferryman_hostcache.service import RunningHostCache

MANIFEST = manifest_of(Kind.FULL, Kind.RECURRENT)
PROMPT = prompt_of(MANIFEST, chain(*range(1, 9)), snapshots=[3, 7])
WISH = PrefetchOptions(PrefetchPolicy.WAIT_COMPLETE, threshold_tokens=PAGE_SIZE)
PATIENCE = 20.0

Frames = Callable[[list[pb.FetchResponse]], Iterator[pb.FetchResponse]]


@dataclass(frozen=True, slots=True)
class ForgedPrompt(StoredPrompt):
    """The right keys over other bytes."""

    def content(self, kind: Kind, page: int) -> bytes:
        return StoredPrompt.content(self, kind, page)[::-1]


FORGED = ForgedPrompt(PROMPT.manifest, PROMPT.keys, PROMPT.names)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each node was asked by others what it holds."""
    counts, real = Counter[str](), HostCacheServicer.Lookup

    async def lookup(
        self: HostCacheServicer, request: pb.LookupRequest, context: Context
    ) -> pb.LookupResponse:
        counts[self._host.identity.node_id] += 1
        return await real(self, request, context)

    monkeypatch.setattr(HostCacheServicer, "Lookup", lookup)
    return counts


@asynccontextmanager
async def node(
    start: StartHostCache, name: str, holds: StoredPrompt | None = None, **settings: Any
) -> AsyncIterator[tuple[RunningHostCache, AttachedTestWorker]]:
    """A host-cache with a worker; its units are in the index."""
    async with (
        start(node=name, **settings) as service,
        worker_at(service.address, MANIFEST, f"prefill-{name}", wish=WISH) as worker,
    ):
        if holds:
            assert await worker.client.store(holds.keys, holds.sources) == len(holds.names)
            async with asyncio.timeout(120):
                await service.publisher.flushed()
        yield service, worker


async def prefetched(worker: AttachedTestWorker) -> Prefetched:
    """Prefetches the prompt, and checks the fetched units byte for byte."""
    brought = await worker.client.prefetch(
        PROMPT.keys, PROMPT.prompt_len, have_pages=0, tags=CallTags("r", 1), patience=PATIENCE
    )
    lease = await worker.client.acquire(PROMPT.keys, PROMPT.prompt_len, 0)
    for (kind, page), unit in lease.view.units.items():
        assert worker.read(unit) == PROMPT.content(kind, page), "a stranger's bytes were taken"
    worker.client.release(lease)
    return brought


def num_forged(service: RunningHostCache) -> int:
    return service.lower_tiers.prefetching.statistics().num_forged


async def test_a_node_of_another_cluster_is_never_asked(
    start_host_cache: StartHostCache, tmp_path: Path, asked: Counter[str]
) -> None:
    other_key = key_file_in(tmp_path, STRANGERS_KEY)
    async with (
        node(start_host_cache, "stranger", FORGED, cluster_key_file=other_key),
        node(start_host_cache, "asker") as (asker, mine),
    ):
        assert (await prefetched(mine)).brought_pages == 0
        assert asked["stranger"] == 0
        assert asker.publisher.statistics().num_forged > 0


async def test_a_node_with_the_key_is_asked_and_believed(
    start_host_cache: StartHostCache, asked: Counter[str]
) -> None:
    """The same two nodes with one key: what else keeps them apart would hide what is tested."""
    async with (
        node(start_host_cache, "friend", PROMPT),
        node(start_host_cache, "asker") as (asker, mine),
    ):
        assert (await prefetched(mine)).brought_pages == 8
        assert asked["friend"] == 1
        assert num_forged(asker) == asker.publisher.statistics().num_forged == 0


async def test_a_stranger_where_a_node_of_ours_was_is_asked_and_not_believed(
    start_host_cache: StartHostCache, redis_url: str, tmp_path: Path, asked: Counter[str]
) -> None:
    """A node's old entries were kept and are put back into the index: their tags are valid."""
    other_key = key_file_in(tmp_path, STRANGERS_KEY)
    async with (
        node(start_host_cache, "gone", FORGED, cluster_key_file=other_key) as (stranger, _),
        node(start_host_cache, "asker") as (asker, mine),
        redis_index(redis_url, KEY, lookup_seconds=10) as index,
    ):
        life = replace(stranger.host.identity, address=stranger.address)
        await silenced(stranger)  # or it would write over what was put back
        await put_in_index(index, life)
        assert (await prefetched(mine)).brought_pages == 0
        assert asked["gone"] == 1
        assert stranger.lower_tiers.fetches.num_units == 0, "nothing was fetched"
        assert num_forged(asker) == 1


async def silenced(service: RunningHostCache) -> None:
    """Stops the publisher and waits for its last write, so that a test writes after it."""
    service.publisher.stop()
    async with asyncio.timeout(120):
        await service.publisher.ended.wait()


async def put_in_index(index: Any, life: NodeLife) -> None:
    """All of the prompt, as `life` would say it."""
    units = [
        IndexedUnit(kind, PROMPT.keys[page], len(content), xxhash.xxh3_128_digest(content))
        for kind, page in PROMPT.names
        for content in [PROMPT.content(kind, page)]
    ]
    await index.announce(life, 60.0)
    await index.commit(life, PROMPT.keys[0], Tier.HOST, units)


class Relay(rpcs.HostCacheServiceServicer):
    """Stands between two nodes: lets lookups through, and changes what is fetched."""

    def __init__(self, holder: rpcs.HostCacheServiceStub, change: Frames) -> None:
        self._holder, self._change = holder, change
        self.num_fetches = 0

    async def Lookup(self, request: pb.LookupRequest, context: Context) -> pb.LookupResponse:
        found: pb.LookupResponse = await self._holder.Lookup(request)
        return found

    async def Fetch(
        self, request: pb.FetchRequest, context: Context
    ) -> AsyncIterator[pb.FetchResponse]:
        self.num_fetches += 1
        frames = [frame async for frame in self._holder.Fetch(request)]
        assert len(frames) >= 8, "one frame for each unit: what is changed was there"
        for frame in self._change(frames):
            yield frame


def with_data(frame: pb.FetchResponse, data: bytes, **more: bytes) -> pb.FetchResponse:
    changed = pb.FetchResponse()
    changed.CopyFrom(frame)
    changed.data = data
    for name, value in more.items():
        setattr(changed, name, value)
    return changed


def other_bytes(frames: list[pb.FetchResponse]) -> Iterator[pb.FetchResponse]:
    """With the digest that they have."""
    for frame in frames:
        data = frame.data[::-1]
        yield with_data(frame, data, digest=xxhash.xxh3_128_digest(data))


def other_bytes_without_a_seal(frames: list[pb.FetchResponse]) -> Iterator[pb.FetchResponse]:
    for frame in other_bytes(frames):
        frame.ClearField("seal")
        yield frame


def pages_in_each_other_s_place(frames: list[pb.FetchResponse]) -> Iterator[pb.FetchResponse]:
    """Each with the digest and the seal that it came with."""
    full = [frame for frame in frames if frame.kind == frames[0].kind]
    for frame, other in zip(full, [*full[1:], full[0]], strict=True):
        yield with_data(frame, other.data, digest=other.digest, seal=other.seal)


class Parrot(Relay):
    """Replays an answer of the holder to another request: to `other`, or from another time."""

    def __init__(self, holder: rpcs.HostCacheServiceStub, other: pb.LookupRequest) -> None:
        super().__init__(holder, iter)
        self._other = other

    async def Lookup(self, request: pb.LookupRequest, context: Context) -> pb.LookupResponse:
        asked = pb.LookupRequest()
        asked.CopyFrom(request)
        asked.MergeFrom(self._other)
        found: pb.LookupResponse = await self._holder.Lookup(asked)
        assert len(found.proof) == 16, "it was given"
        return found


OTHER_TIME = pb.LookupRequest(challenge=b"another's random")
OTHER_CHAIN = pb.LookupRequest(page_keys=b"".join(PROMPT.keys[:4]))


@dataclass(frozen=True, slots=True)
class RelayedAsker:
    """A node that asks, with its worker; the index has the relay's address for the holder's."""

    relay: Relay
    asker: RunningHostCache
    worker: AttachedTestWorker


@asynccontextmanager
async def asker_behind(
    start: StartHostCache, redis_url: str, make: Callable[[rpcs.HostCacheServiceStub], Relay]
) -> AsyncIterator[RelayedAsker]:
    async with (
        node(start, "holder", PROMPT) as (holder, _),
        node(start, "asker") as (asker, worker),
        channel(holder.address) as to_holder,
        redis_index(redis_url, KEY, lookup_seconds=10) as index,
    ):
        relay = make(rpcs.HostCacheServiceStub(to_holder))

        def register(server: Any) -> None:
            rpcs.add_HostCacheServiceServicer_to_server(relay, server)

        async with listening("127.0.0.1:0", register, grace=0.1) as door:
            await silenced(holder)
            life = replace(holder.host.identity, address=f"127.0.0.1:{door.port}")
            await index.announce(life, 60.0)
            yield RelayedAsker(relay, asker, worker)


@pytest.mark.parametrize("other", [OTHER_TIME, OTHER_CHAIN], ids=["time", "chain"])
async def test_an_answer_to_another_question_is_not_believed(
    start_host_cache: StartHostCache, redis_url: str, other: pb.LookupRequest
) -> None:
    async with asker_behind(start_host_cache, redis_url, lambda s: Parrot(s, other)) as made:
        assert (await prefetched(made.worker)).brought_pages == 0
        assert num_forged(made.asker) == 1
        assert made.relay.num_fetches == 0


@pytest.mark.parametrize(
    "change", [other_bytes, other_bytes_without_a_seal, pages_in_each_other_s_place]
)
async def test_what_is_changed_between_two_nodes_is_refused(
    start_host_cache: StartHostCache, redis_url: str, change: Frames
) -> None:
    async with asker_behind(start_host_cache, redis_url, lambda s: Relay(s, change)) as made:
        brought = await prefetched(made.worker)
        assert made.relay.num_fetches == 1
        assert brought.brought_pages == 0
        assert num_forged(made.asker) == 1
        made.asker.host.store.check_integrity()
        assert made.asker.host.store.statistics().num_reservations == 0


async def test_a_relay_that_changes_nothing_is_no_matter(
    start_host_cache: StartHostCache, redis_url: str
) -> None:
    async with asker_behind(start_host_cache, redis_url, lambda s: Relay(s, iter)) as made:
        assert (await prefetched(made.worker)).brought_pages == 8
        assert made.relay.num_fetches == 1
