"""The index in Redis: scripts over one chain (see `redis_scripts`), and the nodes that live.

    fm:node:<node>   string  the record of the life that is alive (`index_seals`), with expiry;
                             a bucket's folder has one too, for a day (`bucket_folders`)
    fm:nodes         set     nodes that may exist

A chain lies in one cluster slot, that of its first page's key. A script accesses one chain only, so
the living nodes are passed to it. Entries of a chain expire a day after the last write.

When a call fails or takes too long, Redis is away: it gets no more calls until it has answered a
probe, which no request waits for. So a hung Redis costs `lookup_seconds` for each request that is
asking at that time, and nothing for later ones.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import redis.asyncio as aioredis
from redis.exceptions import RedisError

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, ResumeShape
from ferryman.cache.units import Tier
from ferryman.cancellation import cancels_kept, end_tasks
from ferryman.security.cluster_key import ClusterKey
from ferryman.security.credentials import Login
from ferryman.wire.redis import redis_scripts as scripts
from ferryman.wire.redis.bucket_folders import with_shared
from ferryman.wire.redis.connections import Authorities, RefusalCount, redis_pool
from ferryman.wire.redis.index import (
    FolderClaim,
    IndexedUnit,
    IndexStatistics,
    NodeLife,
    NodePrefix,
)
from ferryman.wire.redis.index_seals import EntryPlace, IndexSeals, SealedEntries

log = logging.getLogger(__name__)

LOOKUP_SECONDS = 0.2
SOCKET_MARGIN_SECONDS = 0.05
WRITE_SECONDS = 1.0
PROBE_SECONDS = 0.5
LIVING_SECONDS = 1.0
COUNT_SECONDS = 2.0
HASH_TTL_SECONDS = 86_400
MAX_LOOKUPS = 6  # at once: the other connections are for writing and probing
MAX_WAITING = 1024
MAX_DIGESTS = 1024  # in one call: Redis does nothing else meanwhile
NODES = "fm:nodes"

Write = Callable[[], Awaitable[Any]]


@asynccontextmanager
async def redis_index(
    url: str,
    key: ClusterKey,
    *,
    login: Login | None = None,
    authorities: Authorities | None = None,
    lookup_seconds: float = LOOKUP_SECONDS,
) -> AsyncIterator[RedisIndex]:
    """An index for the length of a block, which begins at once, with or without Redis.

    A Redis that takes longer than `lookup_seconds` to answer is away. `login` and `authorities` are
    those of `redis_pool`. Entries that were not written with `key` count as absent. Raises
    ConfigError for a URL that cannot be used.
    """
    pool = redis_pool(url, login, authorities, lookup_seconds + SOCKET_MARGIN_SECONDS)
    client = aioredis.Redis(connection_pool=pool)
    index = RedisIndex(client, IndexSeals(key), lookup_seconds=lookup_seconds)
    probing = asyncio.create_task(index.keep_probing())
    try:
        yield index
    finally:
        await end_tasks((probing,))
        await client.aclose()
        await pool.disconnect()


class RedisIndex:
    """A `PrefixIndex` over one Redis. Only `keep_probing` ends a time in which Redis is away."""

    def __init__(
        self,
        client: aioredis.Redis,
        seals: IndexSeals,
        *,
        lookup_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._lookup_seconds, self._clock = client, lookup_seconds, clock
        self._seals, self._found = seals, SealedEntries(seals)
        self._commit = client.register_script(scripts.COMMIT)
        self._forget = client.register_script(scripts.FORGET)
        self._longest = client.register_script(scripts.LONGEST)
        self._digests = client.register_script(scripts.DIGESTS)
        self._living: Mapping[str, NodeLife] = {}
        self._living_until = float("-inf")
        self._here, self._away = asyncio.Event(), asyncio.Event()
        self._here.set()
        self._lookups = asyncio.Semaphore(MAX_LOOKUPS)
        self._waiting: deque[Write] = deque()
        self._writing = asyncio.Lock()
        self._num_hits, self._num_misses, self._num_misses_away = 0, 0, 0
        self._num_dropped = self._num_failures = 0
        self._refusals = RefusalCount(client)

    @property
    def is_away(self) -> bool:
        return self._away.is_set()

    async def here(self) -> None:
        """Waits until Redis answers."""
        await self._here.wait()

    async def keep_probing(self) -> None:
        """While Redis is away, probes it now and then; until cancelled."""
        while True:
            await self._away.wait()
            await asyncio.sleep(PROBE_SECONDS)
            if await self._answers(self._client.ping, self._lookup_seconds):
                self._living_until = float("-inf")
                self._away.clear()
                self._here.set()
                log.info("index back")
                await self._write_waiting()

    async def keep_counting_refusals(self) -> None:
        """Asks Redis now and then for its refusals; until cancelled, or until it refuses to answer
        this user."""
        while self._refusals.is_told:
            await self._here.wait()
            await self._succeeds(self._refusals.look, self._lookup_seconds)
            await asyncio.sleep(COUNT_SECONDS)

    async def announce(self, node: NodeLife, ttl_seconds: float) -> bool:
        earlier: list[object] = []

        async def beat() -> None:
            life, ttl_ms = self._seals.record_of(node), round(ttl_seconds * 1000)
            async with self._client.pipeline(transaction=False) as pipe:
                pipe.sadd(NODES, node.node_id)
                pipe.set(_node_key(node.node_id), life, px=ttl_ms, get=True)
                earlier.append((await pipe.execute())[1])

        self._living_until = float("-inf")
        if await self._succeeds(beat, WRITE_SECONDS):
            await self._write_waiting()
        return bool(earlier) and earlier[0] is not None

    async def claim(self, folder: NodeLife, ttl_seconds: float) -> FolderClaim:
        """If two owners claim at once, the earlier claim ends at the later owner's next one."""
        claims: list[FolderClaim] = []

        async def ask() -> None:
            key, ttl_ms = _node_key(folder.node_id), round(ttl_seconds * 1000)
            there = self._found.node(folder.node_id, await self._client.get(key))
            if there and there.epoch > folder.epoch:
                claims.append(FolderClaim.SUPERSEDED)
                return
            async with self._client.pipeline(transaction=False) as pipe:
                pipe.sadd(NODES, folder.node_id)
                pipe.set(key, self._seals.record_of(folder), px=ttl_ms)
                await pipe.execute()
            claims.append(FolderClaim.KNOWN if there == folder else FolderClaim.NEW)

        self._living_until = float("-inf")
        await self._succeeds(ask, WRITE_SECONDS)
        return claims[0] if claims else FolderClaim.NEW

    async def withdraw(self, node: NodeLife) -> None:
        async def leave() -> None:
            record = await self._client.get(_node_key(node.node_id))
            if self._found.node(node.node_id, record) == node:
                await self._client.delete(_node_key(node.node_id))

        self._living_until = float("-inf")
        await self._succeeds(leave, WRITE_SECONDS)

    async def commit(
        self, node: NodeLife, root: PageKey, tier: Tier, units: Sequence[IndexedUnit]
    ) -> None:
        """While Redis is away it waits, within MAX_WAITING groups; then the oldest is dropped."""
        arguments: list[str | int] = [node.node_id, node.epoch, tier.value, HASH_TTL_SECONDS]
        for unit in units:
            entry = self._seals.entry_of(EntryPlace(node.owner, tier, unit.kind, unit.key), unit)
            arguments += [unit.key.hex(), unit.kind.value, entry]
        await self._write(lambda: self._commit(keys=[_chain_key(root)], args=arguments))

    async def forget(
        self, node: NodeLife, root: PageKey, tier: Tier, units: Sequence[tuple[Kind, PageKey]]
    ) -> None:
        arguments = [node.owner, tier.value]
        for kind, key in units:
            arguments += [key.hex(), kind.value]
        await self._write(lambda: self._forget(keys=[_chain_key(root)], args=arguments))

    async def usable_pages(
        self, chain: Sequence[PageKey], shape: ResumeShape
    ) -> Mapping[str, NodePrefix]:
        if not chain:
            return {}

        prefixes: dict[str, NodePrefix] = {}
        living: dict[str, NodeLife] = {}

        async def ask() -> None:
            kinds = " ".join(sorted(shape.kinds))
            packed = b"".join(chain).hex()
            living.update(await self._alive())
            arguments = [packed, str(shape.page_size), str(shape.window_len), kinds]
            for node in living.values():
                arguments += [node.node_id, str(node.epoch)]
            reply = await self._longest(keys=[_chain_key(chain[0])], args=arguments)
            for at in range(0, len(reply), 5):
                node_id, usable, host, *ends = reply[at : at + 5]
                holding = NodePrefix(living[str(node_id)], int(usable), int(host))
                prefixes.update(self._found.holding(holding, chain, shape, ends))

        async with self._lookups:
            was_here = await self._succeeds(ask, self._lookup_seconds)
        if not was_here:
            self._num_misses_away += 1
            return {}
        self._num_hits += bool(prefixes)
        self._num_misses += not prefixes
        return with_shared(prefixes, living.values())

    async def digests(
        self, node: NodeLife, root: PageKey, units: Sequence[tuple[Kind, PageKey]]
    ) -> Mapping[tuple[Kind, PageKey], frozenset[bytes]]:
        announced = await self._entries(node, root, units)
        by_unit = {unit: self._found.digests(node, unit, entries) for unit, entries in announced}
        return {unit: digests for unit, digests in by_unit.items() if digests}

    async def stored_units(
        self, node: NodeLife, root: PageKey, units: Sequence[tuple[Kind, PageKey]]
    ) -> Mapping[tuple[Kind, PageKey], IndexedUnit]:
        announced = await self._entries(node, root, units)
        by_unit = {unit: self._found.stored(node, unit, stored) for unit, (_, stored) in announced}
        return {unit: indexed for unit, indexed in by_unit.items() if indexed}

    async def _entries(
        self, node: NodeLife, root: PageKey, units: Sequence[tuple[Kind, PageKey]]
    ) -> list[tuple[tuple[Kind, PageKey], tuple[str, str]]]:
        """Units with the entries that `node` wrote, in the order of TIERS."""
        pairs: list[tuple[tuple[Kind, PageKey], tuple[str, str]]] = []
        for at in range(0, len(units), MAX_DIGESTS):
            some = units[at : at + MAX_DIGESTS]
            reply = await self._some_entries(node, root, some)
            pairs += zip(some, zip(reply[::2], reply[1::2], strict=True), strict=False)
        return pairs

    async def _some_entries(
        self, node: NodeLife, root: PageKey, units: Sequence[tuple[Kind, PageKey]]
    ) -> list[str]:
        """Two for each unit; none if the index is away."""
        arguments = [node.owner]
        for kind, key in units:
            arguments += [key.hex(), kind.value]
        reply: list[str] = []

        async def ask() -> None:
            reply.extend(await self._digests(keys=[_chain_key(root)], args=arguments))

        async with self._lookups:
            await self._succeeds(ask, self._lookup_seconds)
        return reply

    def statistics(self) -> IndexStatistics:
        return IndexStatistics(
            num_hits=self._num_hits,
            num_misses=self._num_misses,
            num_misses_away=self._num_misses_away,
            num_waiting=len(self._waiting),
            num_dropped=self._num_dropped,
            num_failures=self._num_failures,
            num_forged=self._found.num_forged,
            num_refused=self._refusals.number,
            is_away=self.is_away,
        )

    async def _alive(self) -> Mapping[str, NodeLife]:
        """The living nodes by node id; read anew every second."""
        if self._clock() >= self._living_until:
            nodes = sorted(str(node) for node in await self._client.smembers(NODES))
            lives = await self._client.mget([_node_key(node) for node in nodes]) if nodes else []
            parsed = [self._found.node(*pair) for pair in zip(nodes, lives, strict=True)]
            self._living = {life.node_id: life for life in parsed if life}
            self._living_until = self._clock() + LIVING_SECONDS
        return self._living

    async def _write(self, write: Write) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.popleft()
            self._num_dropped += 1
        self._waiting.append(write)
        await self._write_waiting()

    async def _write_waiting(self) -> None:
        """Writes keep their order: a unit that was forgotten after its commit stays forgotten."""
        async with self._writing:
            while self._waiting and not self.is_away:
                write = self._waiting[0]
                if not await self._succeeds(write, WRITE_SECONDS):
                    return
                if self._waiting and self._waiting[0] is write:
                    self._waiting.popleft()

    async def _succeeds(self, ask: Callable[[], Awaitable[object]], seconds: float) -> bool:
        """Whether Redis did it. After a failure it gets no call until it has answered a probe."""
        if self.is_away:
            return False
        if not await self._answers(ask, seconds):
            self._here.clear()
            self._away.set()
            return False
        return True

    async def _answers(self, ask: Callable[[], Awaitable[object]], seconds: float) -> bool:
        try:
            with cancels_kept():
                async with asyncio.timeout(seconds):
                    await ask()
        except (RedisError, OSError, TimeoutError) as error:
            self._num_failures += 1
            if not self.is_away:
                log.warning("index away: %s: %s", type(error).__name__, error)
            return False
        return True


def _chain_key(root: PageKey) -> str:
    return f"fm:{{{root.hex()}}}"


def _node_key(node_id: str) -> str:
    return f"fm:node:{node_id}"
