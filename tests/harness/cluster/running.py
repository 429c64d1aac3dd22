"""A cluster that is ready: real broker, real index, real services; what an observer reads of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path

from tests.cluster_keys import token_of
from tests.harness.cluster.processes import ServiceProcesses
from tests.harness.cluster.shape import PAGE_SIZE, ClusterShape
from tests.servers import TESTS, locked_nats_server, redis_server
from tests.waiting import LOOK_SECONDS

from ferryman.cache.keys import PageKey, as_token_ids, page_keys, root_key
from ferryman.cache.units import Tier
from ferryman.errors import Unavailable
from ferryman.handoff.lifecycle import LifecycleEntry, is_over
from ferryman.llm import LLM
from ferryman.runtime.lifecycle import decode_event
from ferryman.security.credentials import ClusterRole
from ferryman.wire.grpc.rpc import channel
from ferryman.wire.nats.bus import Bus
from ferryman.wire.nats.connection import NatsOptions
from ferryman.wire.nats.nats_bus import NatsBus, nats_bus
from ferryman.wire.nats.subjects import Subjects
from ferryman.wire.v1 import hostcache_pb2
from ferryman.wire.v1.hostcache_pb2_grpc import HostCacheServiceStub


class Cluster(ServiceProcesses):
    """The processes, and what their broker and their host-caches say."""

    @asynccontextmanager
    async def bus(self) -> AsyncIterator[NatsBus]:
        async with nats_bus(NatsOptions(self.nats, "tests", TESTS)) as bus:
            await bus.connected()
            yield bus

    async def plane_of(self, request_id: str) -> str:
        """On which plane a request was handed off, as its events say."""
        handed_off = f"{Subjects().root}.life.prefill.*.{request_id}.handed_off"
        async with self.bus() as bus:
            (event, *_) = await events_until(bus, handed_off, bool)
        return str(event.facts["path"])

    async def log_of(self, request_id: str) -> list[LifecycleEntry]:
        """The whole log of a request, once it is over."""
        subject = f"{Subjects().root}.life.*.*.{request_id}.>"
        async with self.bus() as bus:
            return await events_until(bus, subject, is_over)

    async def flush_device(self, role: str) -> None:
        """Drops the unused cached units from the devices of the workers of a role."""
        async with self.bus() as bus:
            for service in self.of_role(role):
                subject = Subjects().control(str(service.ready["worker_id"]), "flush")
                await bus.request(subject, b"", timeout_seconds=60)

    async def flush_host(self, token_ids: Sequence[int], node: int = 0) -> None:
        """Flushes a node's arena until it has nothing of a prompt: what is read or written at that
        moment stays."""
        keys = self.keys_of(token_ids)
        subject = Subjects().control(str(self.hostcache(node).ready["worker_id"]), "flush")
        async with self.bus() as bus, self._lookups(keys, node) as look, asyncio.timeout(120):
            while True:
                await bus.request(subject, b"", timeout_seconds=60)
                if not (await look()).resident:
                    return

    def keys_of(self, token_ids: Sequence[int]) -> tuple[PageKey, ...]:
        """Of all full pages of a prompt."""
        return page_keys(self._root, as_token_ids(token_ids), PAGE_SIZE)

    @cached_property
    def _root(self) -> PageKey:
        """Found once: that loads the model."""
        return root_key(self.shape.manifest_of(self.model))

    async def await_stored(
        self, token_ids: Sequence[int], *, node: int = 0, tier: Tier = Tier.HOST
    ) -> None:
        """Until a node's tier holds a usable prefix of all full pages of a prompt.

        In storage: all full pages, and the snapshot at their end where the model has snapshots.
        """
        keys = self.keys_of(token_ids)
        async with self._lookups(keys, node) as look, asyncio.timeout(120):
            # Another process stores; there is no event here.
            while not _has_all(await look(), len(keys), tier):  # noqa: ASYNC110
                await asyncio.sleep(LOOK_SECONDS)

    @asynccontextmanager
    async def _lookups(
        self, keys: Sequence[PageKey], node: int
    ) -> AsyncIterator[Callable[[], Awaitable[hostcache_pb2.LookupResponse]]]:
        """Each says what a node's host-cache has of these pages."""
        hostcache = self.hostcache(node)
        token = token_of(ClusterRole.HOST_CACHE)
        async with channel(str(hostcache.ready["address"]), token) as way:
            request = hostcache_pb2.LookupRequest(
                epoch=int(hostcache.ready["epoch"]), page_keys=b"".join(keys)
            )
            yield partial(HostCacheServiceStub(way).Lookup, request)

    async def hostcache_stats(self, node: int = 0) -> hostcache_pb2.StatsResponse:
        """The counts of a node's host-cache."""
        address = str(self.hostcache(node).ready["address"])
        async with channel(address, token_of(ClusterRole.OBSERVER)) as way:
            stats = HostCacheServiceStub(way).Stats
            found: hostcache_pb2.StatsResponse = await stats(hostcache_pb2.StatsRequest())
            return found


async def events_until(
    bus: Bus, pattern: str, is_enough: Callable[[list[LifecycleEntry]], bool]
) -> list[LifecycleEntry]:
    """The lifecycle events on some subjects, as soon as they are enough.

    Other processes say them, each at its own time; what was said is only asked for.
    """
    async with asyncio.timeout(120):
        while True:
            with suppress(Unavailable):  # the broker of a busy machine takes longer than a call may
                entries = await bus.history(pattern, max_events=999)
                events = [decode_event(entry.payload) for entry in entries]
                if is_enough(events):
                    return events
            await asyncio.sleep(LOOK_SECONDS)


def _has_all(found: hostcache_pb2.LookupResponse, num_pages: int, tier: Tier) -> bool:
    if tier is Tier.HOST:
        return found.usable_pages == num_pages
    kinds = {each.kind for each in found.resident} or {each.kind for each in found.in_storage}
    ends = {each.kind for each in found.in_storage if each.end_page == num_pages}
    return bool(kinds) and kinds <= ends


@contextmanager
def running_cluster(model: Path, folder: Path, shape: ClusterShape) -> Iterator[Cluster]:
    """A cluster that is ready, for the length of a block; ends with every process gone."""
    compile_kernels(model, shape)
    with (
        locked_nats_server() as nats,
        redis_server() as redis,
        started_cluster(Cluster(model, folder, shape, nats, redis)) as cluster,
    ):
        yield cluster


@contextmanager
def started_cluster(cluster: Cluster) -> Iterator[Cluster]:
    """All processes of a cluster whose broker and index run already."""
    shape = cluster.shape
    both = shape.num_both
    with ExitStack() as stack:
        stack.callback(cluster.stop)
        for service in [cluster.start(role, node) for role, node in shape.starts()]:
            service.await_ready()
        cluster.await_workers(
            prefill=(shape.num_prefill + both) * shape.worker_nodes,
            decode=(shape.num_decode + both) * shape.worker_nodes,
        )
        yield cluster


def compile_kernels(model: Path, shape: ClusterShape) -> None:
    """Once, here, into the cache on disk; or every worker would, all at the same time."""
    with LLM(model, dtype=shape.dtype, page_size=PAGE_SIZE, memory_bytes=32 << 20):
        pass
