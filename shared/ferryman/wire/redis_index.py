"""The index in Redis.

    fm:{<root>}:<page key>    hash    <kind>:<tier>:<node>#<epoch> → bytes,digest,generation
    fm:node:<node>            string  <epoch> <address> of the life that is alive, with expiry
    fm:nodes                  set     the nodes there may be

Keys are in hex. A chain lies in one cluster slot, that of its first page's key; a script touches
one chain only, so the living nodes are told to it. A hash expires a day after its last commit.
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
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.cache.units import Tier
from ferryman.errors import ConfigError
from ferryman.wire.index import Holding, IndexedUnit, IndexStatistics, NodeLife, ResumeShape

log = logging.getLogger(__name__)

SOCKET_SECONDS = 0.25
AWAY_SECONDS = 1.0
LIVING_SECONDS = 1.0
HASH_TTL_SECONDS = 86_400
MAX_CONNECTIONS = 8
MAX_WAITING = 1024
NODES = "fm:nodes"

Write = Callable[[], Awaitable[Any]]

COMMIT = """
-- The whole group or nothing: a script is never interrupted.
-- KEYS: fm:{root}   ARGV: owner, tier, seconds to live, then (page key, kind, value) per unit
for at = 4, #ARGV, 3 do
    local name = KEYS[1] .. ':' .. ARGV[at]
    redis.call('HSET', name, ARGV[at + 1] .. ':' .. ARGV[2] .. ':' .. ARGV[1], ARGV[at + 2])
    redis.call('EXPIRE', name, ARGV[3])
end
"""

FORGET = """
-- KEYS: fm:{root}   ARGV: owner, tier, then (page key, kind) per unit
for at = 3, #ARGV, 2 do
    local field = ARGV[at + 1] .. ':' .. ARGV[2] .. ':' .. ARGV[1]
    redis.call('HDEL', KEYS[1] .. ':' .. ARGV[at], field)
end
"""

LONGEST = """
-- The longest usable prefix of a chain, per living node.
-- KEYS: fm:{root}   ARGV: packed page keys, page size, window length, kinds, then (node, epoch)...
local packed, page_size, window_len = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local wants = {}
for kind in string.gmatch(ARGV[4], '%a+') do wants[kind] = true end
local living = {}
for at = 5, #ARGV, 2 do living[ARGV[at]] = ARGV[at + 1] end

-- Who holds what of page i (from 1). Entries of a living node's earlier lives are removed.
local pages = {}
local function page(i)
    if pages[i] then return pages[i] end
    local name = KEYS[1] .. ':' .. string.sub(packed, i * 32 - 31, i * 32)
    local held, void = {}, {}
    for _, field in ipairs(redis.call('HKEYS', name)) do
        local kind, tier, node, epoch = string.match(field, '^(%a+):(%a+):(.+)#(%d+)$')
        if node and living[node] == epoch then
            held[kind .. ':any:' .. node] = true
            held[kind .. ':' .. tier .. ':' .. node] = true
        elseif node and living[node] then void[#void + 1] = field end
    end
    if #void > 0 then redis.call('HDEL', name, unpack(void)) end
    pages[i] = held
    return held
end

-- Full pages are evicted leaf first, so presence is prefix-closed, and bisection finds its end.
local function full_depth(tier, node)
    local low, high = 0, #packed / 32
    if not wants.full then return high end
    while low < high do
        local middle = math.ceil((low + high) / 2)
        if page(middle)['full:' .. tier .. ':' .. node] then low = middle else high = middle - 1 end
    end
    return low
end

local function is_usable(tier, node, depth)
    local whose = ':' .. tier .. ':' .. node
    if wants.recurrent and not page(depth)['recurrent' .. whose] then return false end
    if wants.window then
        local first = math.floor(math.max(0, depth * page_size - window_len + 1) / page_size)
        for i = first + 1, depth do
            if not page(i)['window' .. whose] then return false end
        end
    end
    return true
end

local found = {}
for at = 5, #ARGV, 2 do
    local node, depths = ARGV[at], {}
    for _, tier in ipairs({'any', 'host'}) do
        local depth = full_depth(tier, node)
        while depth > 0 and not is_usable(tier, node, depth) do depth = depth - 1 end
        depths[tier] = depth
    end
    if depths.any > 0 then
        found[#found + 1] = node
        found[#found + 1] = depths.any
        found[#found + 1] = depths.host
    end
end
return found
"""


@asynccontextmanager
async def redis_index(url: str) -> AsyncIterator[RedisIndex]:
    """An index for the length of a block, which begins at once, Redis or no Redis."""
    try:
        pool = aioredis.BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=SOCKET_SECONDS,
            socket_timeout=SOCKET_SECONDS,
            socket_connect_timeout=SOCKET_SECONDS,
            retry=Retry(NoBackoff(), 0),
            decode_responses=True,
        )
    except ValueError as error:
        raise ConfigError(f"{url!r} is no Redis URL: {error}") from error
    client = aioredis.Redis(connection_pool=pool)
    try:
        yield RedisIndex(client)
    finally:
        await client.aclose()
        await pool.disconnect()


class RedisIndex:
    """A `PrefixIndex` over one Redis. After a failure it is not asked again for AWAY_SECONDS."""

    def __init__(
        self, client: aioredis.Redis, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client, self._clock = client, clock
        self._commit = client.register_script(COMMIT)
        self._forget = client.register_script(FORGET)
        self._longest = client.register_script(LONGEST)
        self._living: Mapping[str, NodeLife] = {}
        self._living_until = float("-inf")
        self._away_until = float("-inf")
        self._waiting: deque[Write] = deque()
        self._writing = asyncio.Lock()
        self._num_hits, self._num_misses, self._num_misses_away = 0, 0, 0
        self._num_dropped = 0

    @property
    def is_away(self) -> bool:
        return self._clock() < self._away_until

    async def announce(self, node: NodeLife, ttl_seconds: float) -> None:
        async def beat() -> None:
            async with self._client.pipeline(transaction=False) as pipe:
                pipe.sadd(NODES, node.node_id)
                pipe.set(_node_key(node.node_id), _life(node), px=round(ttl_seconds * 1000))
                await pipe.execute()

        self._living_until = float("-inf")
        if await self._succeeds(beat):
            await self._write_waiting()

    async def withdraw(self, node: NodeLife) -> None:
        async def leave() -> None:
            said = await self._client.get(_node_key(node.node_id))
            if said is not None and _node_life(node.node_id, str(said)) == node:
                await self._client.delete(_node_key(node.node_id))

        self._living_until = float("-inf")
        await self._succeeds(leave)

    async def commit(
        self, node: NodeLife, root: PageKey, tier: Tier, units: Sequence[IndexedUnit]
    ) -> None:
        """With Redis away it waits, within MAX_WAITING groups; then the oldest is dropped."""
        arguments: list[str | int] = [node.owner, tier.value, HASH_TTL_SECONDS]
        for unit in units:
            value = f"{unit.num_bytes},{unit.digest.hex()},{unit.generation}"
            arguments += [unit.key.hex(), unit.kind.value, value]
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
    ) -> Mapping[str, Holding]:
        if not chain:
            return {}

        found: dict[str, Holding] = {}

        async def ask() -> None:
            kinds = " ".join(sorted(shape.kinds))
            packed, living = b"".join(chain).hex(), await self._alive()
            arguments = [packed, str(shape.page_size), str(shape.window_len), kinds]
            for node in living.values():
                arguments += [node.node_id, str(node.epoch)]
            said = await self._longest(keys=[_chain_key(chain[0])], args=arguments)
            for at in range(0, len(said), 3):
                node_id, usable, host = str(said[at]), int(said[at + 1]), int(said[at + 2])
                found[node_id] = Holding(living[node_id], usable, host)

        if not await self._succeeds(ask):
            self._num_misses_away += 1
            return {}
        self._num_hits += bool(found)
        self._num_misses += not found
        return found

    def statistics(self) -> IndexStatistics:
        return IndexStatistics(
            num_hits=self._num_hits,
            num_misses=self._num_misses,
            num_misses_away=self._num_misses_away,
            num_waiting=len(self._waiting),
            num_dropped=self._num_dropped,
            is_away=self.is_away,
        )

    async def _alive(self) -> Mapping[str, NodeLife]:
        """The living nodes by node id; asked anew every second."""
        if self._clock() >= self._living_until:
            nodes = sorted(str(node) for node in await self._client.smembers(NODES))
            lives = await self._client.mget([_node_key(node) for node in nodes]) if nodes else []
            told = zip(nodes, lives, strict=True)
            self._living = {node: _node_life(node, str(life)) for node, life in told if life}
            self._living_until = self._clock() + LIVING_SECONDS
        return self._living

    async def _write(self, write: Write) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.popleft()
            self._num_dropped += 1
        self._waiting.append(write)
        await self._write_waiting()

    async def _write_waiting(self) -> None:
        """Writes keep their order: what was forgotten after it was committed stays forgotten."""
        async with self._writing:
            while self._waiting and not self.is_away:
                write = self._waiting[0]
                if not await self._succeeds(write):
                    return
                if self._waiting and self._waiting[0] is write:
                    self._waiting.popleft()

    async def _succeeds(self, ask: Callable[[], Awaitable[object]]) -> bool:
        """Whether Redis did it. After a failure nobody asks for a while: a hung one costs once."""
        if self.is_away:
            return False
        try:
            await ask()
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("index away for %.1f s: %s", AWAY_SECONDS, error)
            self._away_until = self._clock() + AWAY_SECONDS
            return False
        return True


def _chain_key(root: PageKey) -> str:
    return f"fm:{{{root.hex()}}}"


def _node_key(node_id: str) -> str:
    return f"fm:node:{node_id}"


def _life(node: NodeLife) -> str:
    return f"{node.epoch} {node.address}"


def _node_life(node_id: str, text: str) -> NodeLife:
    """Inverse of `_life`."""
    epoch, _, address = text.partition(" ")
    return NodeLife(node_id, int(epoch), address)
