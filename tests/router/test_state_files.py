"""The router's part of a state file, over host-caches that answer what a test says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import numpy as np
import pytest
import xxhash
from tests.cluster_keys import KEY, STRANGERS_KEY

from ferryman.cache.keys import TokenIds, as_token_ids, page_keys, root_key
from ferryman.cache.manifest import Kind
from ferryman.errors import CorruptState, FerrymanError, NotFound, Unavailable
from ferryman.handoff.values import UnitName
from ferryman.schedule.request import SamplingParams
from ferryman.security.state_signatures import StateSigner
from ferryman.text.located_prompt import LocatedPrompt
from ferryman.wire.codec.scalars import kind_to_wire
from ferryman.wire.grpc.role_tokens import OPEN_TO_ALL
from ferryman.wire.grpc.rpc import Channels, listening
from ferryman.wire.hostcache.unit_seals import NamedUnit, NotOfThisCluster, UnitSeals
from ferryman.wire.nats.heartbeat import HOSTCACHE, Heartbeat, ServedState
from ferryman.wire.public import TokenPrompt
from ferryman.wire.signed_orders import RouterSignatures
from ferryman.wire.v1 import hostcache_pb2 as pb
from ferryman.wire.v1 import hostcache_pb2_grpc
from ferryman_router.request.context import RouterContext
from ferryman_router.request.request_table import RequestTable
from ferryman_router.request.state_files import StateFiles
from ferryman_router.request.state_nodes import HeldState, StateNodes
from ferryman_router.routing.fleet import Fleet
from ferryman_router.routing.generate_request import (
    Caller,
    GenerateRequest,
    RequestedSampling,
    Tenant,
    TokenizedRequest,
)
from ferryman_router.routing.recent_prompts import RecentPrompts

STATE = ServedState("f0", 4, "ab" * 16, (Kind.FULL,))
TOKENS = as_token_ids(np.arange(12))
KEYS = page_keys(root_key(STATE), TOKENS, 4)
NAMES = tuple((Kind.FULL, page) for page in range(3))
OURS, THEIRS = Tenant("ours", b"salt of ours"), Tenant("theirs", b"salt of theirs")


def content(page: int) -> bytes:
    return bytes([page + 1]) * 50


def frame(name: UnitName, seals: UnitSeals, data: bytes) -> pb.FetchResponse:
    kind, page = name
    digest = xxhash.xxh3_128_digest(content(page))
    named = NamedUnit(STATE.digest, kind, KEYS[page], 50, digest)
    return pb.FetchResponse(
        kind=kind_to_wire(kind),
        page_index=page,
        num_bytes=50,
        digest=digest,
        seal=seals.seal_of(named),
        data=data,
    )


class ScriptedHostCache(hostcache_pb2_grpc.HostCacheServiceServicer):
    """Answers a fetch with these frames, and holds nothing that could be looked up."""

    def __init__(self, frames: Sequence[pb.FetchResponse]) -> None:
        self._frames = frames

    async def Fetch(self, request: Any, context: Any) -> AsyncIterator[pb.FetchResponse]:
        for answer in self._frames:
            yield answer

    async def Lookup(self, request: Any, context: Any) -> pb.LookupResponse:
        return pb.LookupResponse()


@asynccontextmanager
async def scripted(frames: Sequence[pb.FetchResponse]) -> AsyncIterator[Heartbeat]:
    def register(server: Any) -> None:
        servicer = ScriptedHostCache(frames)
        hostcache_pb2_grpc.add_HostCacheServiceServicer_to_server(servicer, server)

    async with listening("127.0.0.1:0", register, grace=0) as door:
        address = f"127.0.0.1:{door.port}"
        yield Heartbeat(HOSTCACHE, "hostcache-1", 7, address, True, STATE, 0, node="node-1")


def nodes_of(fleet: Fleet, channels: Channels) -> StateNodes:
    return StateNodes(fleet, channels, UnitSeals(KEY), RouterSignatures(OPEN_TO_ALL))


@asynccontextmanager
async def fetching(frames: Sequence[pb.FetchResponse]) -> AsyncIterator[tuple[StateNodes, Any]]:
    async with scripted(frames) as cache, Channels() as channels:
        yield nodes_of(Fleet(8.0), channels), HeldState(cache, KEYS, 3, NAMES)


async def fetched(frames: Sequence[pb.FetchResponse]) -> bytes:
    async with fetching(frames) as (nodes, held):
        return b"".join([piece.data async for piece in nodes.fetch(held)])


def whole(seals: UnitSeals) -> list[pb.FetchResponse]:
    return [frame(name, seals, content(name[1])) for name in NAMES]


async def test_units_come_in_order_and_whole() -> None:
    assert await fetched(whole(UnitSeals(KEY))) == content(0) + content(1) + content(2)


@pytest.mark.parametrize("page", range(3))
async def test_a_unit_that_was_evicted_just_before_says_to_save_again(page: int) -> None:
    frames = whole(UnitSeals(KEY))
    del frames[page]
    with pytest.raises(Unavailable, match="save it again"):
        await fetched(frames)


async def test_a_strangers_unit_is_not_taken() -> None:
    with pytest.raises(NotOfThisCluster):
        await fetched(whole(UnitSeals(STRANGERS_KEY)))


@pytest.mark.parametrize("data", [bytes(50), bytes(51), b""])
async def test_other_bytes_than_sealed_are_corrupt(data: bytes) -> None:
    frames = whole(UnitSeals(KEY))
    frames[1] = frame(NAMES[1], UnitSeals(KEY), data)
    with pytest.raises(CorruptState):
        await fetched(frames)


async def test_a_stream_that_ends_within_a_unit_is_not_a_whole_one() -> None:
    frames = whole(UnitSeals(KEY))
    frames[2] = frame(NAMES[2], UnitSeals(KEY), content(2)[:20])
    with pytest.raises(Unavailable):
        await fetched(frames)


# State that host-caches hold.


async def deepest(*caches: Heartbeat) -> HeldState | None:
    fleet = Fleet(8.0)
    for cache in caches:
        fleet.on_heartbeat(cache, 0.0)
    async with Channels() as channels:
        return await nodes_of(fleet, channels).deepest(TOKENS, b"", "")


async def test_nothing_is_known_of_state_before_a_host_cache_is_heard_of() -> None:
    with pytest.raises(Unavailable, match="no host-cache that keeps this model's state answers"):
        await deepest()


async def test_a_host_cache_that_is_away_does_not_hold_nothing() -> None:
    async with scripted(()) as cache:
        assert await deepest(cache) is None
    with pytest.raises(Unavailable):
        await deepest(cache)


# Requests that ended a while ago.


class EmptyNodes:
    """Host-caches that hold nothing; notes the tokens, the salt and the adapter asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], bytes, str]] = []

    async def deepest(self, token_ids: TokenIds, salt: bytes, adapter: str) -> None:
        self.asked.append((token_ids.tolist(), salt, adapter))


def prompt_of(tenant: Tenant, request_id: str) -> TokenizedRequest:
    caller = Caller(request_id, tenant, 60.0, "")
    sampling = RequestedSampling(SamplingParams())
    request = GenerateRequest(caller, "tiny", TokenPrompt(TOKENS), sampling, 0.0)
    return TokenizedRequest(
        request, LocatedPrompt(TOKENS), SamplingParams(), frozenset(), "ad" * 16
    )


async def error_of(files: StateFiles, tenant: Tenant, name: str) -> FerrymanError:
    with pytest.raises(FerrymanError) as caught:
        await anext(files.save(tenant, name))
    return caught.value


async def test_a_prompt_is_saved_by_its_tenant_for_as_long_as_it_is_compared() -> None:
    recent, nodes = RecentPrompts(8, str), EmptyNodes()
    recent.add(prompt_of(OURS, "first"))
    files = StateFiles(
        cast(RouterContext, None), RequestTable(), recent, cast(StateNodes, nodes), StateSigner(KEY)
    )
    assert "no host-cache holds" in str(await error_of(files, OURS, "first"))
    assert nodes.asked == [(TOKENS.tolist(), OURS.salt, "ad" * 16)]
    for tenant, name in ((THEIRS, "first"), (OURS, "second")):
        error = await error_of(files, tenant, name)
        assert isinstance(error, NotFound)
        assert "no late request of yours" in str(error)
    assert len(nodes.asked) == 1
