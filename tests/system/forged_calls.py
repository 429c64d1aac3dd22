"""Orders to the workers of a cluster by anybody with a token, and forged entries of its index."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from tests.cluster_keys import STRANGERS_KEY
from tests.refused_calls import answers_to

from ferryman.cache.keys import as_token_ids, page_keys, root_key
from ferryman.cache.manifest import Kind
from ferryman.cache.units import Tier
from ferryman.errors import Unreachable
from ferryman.handoff.effects import WriteFence
from ferryman.handoff.values import WantedUnit
from ferryman.schedule.batch import Sampled
from ferryman.schedule.request import Request, SamplingParams
from ferryman.security.credentials import Login
from ferryman.tiers.values import WorkerLife
from ferryman.wire.codec.handoff import (
    abort_order_to_wire,
    commit_order_to_wire,
    hand_off_order_to_wire,
    reserve_order_to_wire,
)
from ferryman.wire.codec.pieces import Piece, WriteHeader, header_to_wire, piece_to_wire
from ferryman.wire.codec.prefill import prefill_order_to_wire
from ferryman.wire.codec.tokens import cursor_to_wire
from ferryman.wire.grpc.role_tokens import OPEN_TO_ALL
from ferryman.wire.grpc.rpc import channel
from ferryman.wire.grpc.status import typed_errors
from ferryman.wire.nats.heartbeat import Heartbeat
from ferryman.wire.plane_values import NixlOffer
from ferryman.wire.redis.index import IndexedUnit, NodeLife
from ferryman.wire.redis.redis_index import redis_index
from ferryman.wire.signed_orders import RouterSignatures
from ferryman.wire.v1 import decode_pb2, hostcache_pb2, prefill_pb2
from ferryman.wire.v1.decode_pb2_grpc import DecodeServiceStub
from ferryman.wire.v1.hostcache_pb2_grpc import HostCacheServiceStub
from ferryman.wire.v1.prefill_pb2_grpc import PrefillServiceStub
from ferryman.wire.values import (
    CommitOrder,
    PrefillOrder,
    RequestContext,
    ReserveOrder,
    RouterAbort,
    TokenCursor,
    Usage,
    WorkerAddress,
    WriterAbort,
)

TOKENS = tuple(range(5, 41))
CALL_SECONDS = 120
GUESSED = "res-" + 24 * "0"
NO_SIGNATURES = RouterSignatures(OPEN_TO_ALL)


# The calls of `ForgedCalls`: the process that is called, and the method.
CALLS = {
    "prefill": ("prefill", "PrefillService/Prefill"),
    "stop_writing": ("prefill", "PrefillService/StopWriting"),
    "reserve": ("decode", "DecodeService/Reserve"),
    "renew": ("decode", "DecodeService/Renew"),
    "write_pages": ("decode", "DecodeService/WritePages"),
    "land_pages": ("decode", "DecodeService/LandPages"),
    "commit": ("decode", "DecodeService/Commit"),
    "abort": ("decode", "DecodeService/Abort"),
    "detach": ("decode", "DecodeService/Detach"),
    "hand_off": ("decode", "DecodeService/HandOff"),
    "read_tokens": ("decode", "DecodeService/Tokens"),
    "attach": ("hostcache", "HostCacheService/Attach"),
    "look_up": ("hostcache", "HostCacheService/Lookup"),
    "fetch": ("hostcache", "HostCacheService/Fetch"),
    "deposit": ("hostcache", "HostCacheService/Deposit"),
}


def method_of(call: str) -> str:
    return f"/ferryman.wire.v1.{CALLS[call][1]}"


@dataclass(frozen=True)
class ForgedCalls:
    """The calls of somebody with this token, who signs orders as he can. Each raises the worker's
    refusal, as a typed error.

    `request_id` is one that runs, `router_id` the router it belongs to.
    """

    token: str
    beats: Mapping[str, Heartbeat]
    request_id: str
    router_id: str
    signatures: RouterSignatures = NO_SIGNATURES

    async def prefill(self) -> None:
        """A prompt of its own, computed and handed off to the decode worker."""
        prefill = self.beats["prefill"]
        order = PrefillOrder(
            context=self._context(),
            worker_epoch=prefill.epoch,
            decode=_address(self.beats["decode"]),
            router_id="router-00000000",
            request=self._request(),
            manifest_digest=prefill.state.digest,
        )
        async with channel(prefill.address, self.token) as way:
            with typed_errors():
                signed = self.signatures.attempt(order, _address(prefill), is_move=False)
                call = PrefillServiceStub(way).Prefill(
                    prefill_order_to_wire(signed), timeout=CALL_SECONDS
                )
                async for _ in call:
                    pass

    async def stop_writing(self) -> None:
        """The word of a decode worker that a writer has to stop."""
        async with channel(self.beats["prefill"].address, self.token) as way:
            with typed_errors():
                await PrefillServiceStub(way).StopWriting(
                    prefill_pb2.StopWritingRequest(request_id=self.request_id, attempt=1),
                    timeout=CALL_SECONDS,
                )

    async def reserve(self) -> None:
        """Slots at the decode worker, and the metadata of its NIXL agent."""
        decode = self.beats["decode"]
        order = ReserveOrder(
            context=self._context(),
            worker_epoch=decode.epoch,
            writer=_address(self.beats["prefill"]),
            router_id="router-00000000",
            request=self._request(),
            manifest_digest=decode.state.digest,
            manifest_json="",
            offer=NixlOffer("127.0.0.1:1"),
        )
        await self._decode(lambda stub: stub.Reserve(reserve_order_to_wire(order)))

    async def renew(self) -> None:
        """The life of another's reservation."""
        asked = decode_pb2.RenewRequest(epoch=self._fence.epoch, reservation_id=GUESSED, attempt=1)
        await self._decode(lambda stub: stub.Renew(asked))

    async def write_pages(self) -> None:
        """Bytes into the pages of another's reservation."""
        digest = self.beats["decode"].state.digest
        header = header_to_wire(WriteHeader(self._fence, self.request_id, digest))
        piece = piece_to_wire(Piece(WantedUnit(Kind.FULL, 0, 1), 0, b"x" * 16))

        frames = (
            decode_pb2.WritePagesRequest(header=header),
            decode_pb2.WritePagesRequest(pieces=[piece]),
        )
        await answers_to(
            self.beats["decode"].address,
            self.token,
            method_of("write_pages"),
            [frame.SerializeToString() for frame in frames],
        )

    async def land_pages(self) -> None:
        """The same from memory that was lent to another writer."""
        digest = self.beats["decode"].state.digest
        header = header_to_wire(WriteHeader(self._fence, self.request_id, digest))
        frame = decode_pb2.LandPagesRequest(header=header, key=bytes(32))
        await answers_to(
            self.beats["decode"].address,
            self.token,
            method_of("land_pages"),
            [frame.SerializeToString()],
        )

    async def commit(self) -> None:
        """The end of another's hand-off, with a first token that its prompt does not have."""
        context = RequestContext(self.request_id, 1, 20.0)
        first = Sampled(7, {})
        order = CommitOrder(context, GUESSED, self._fence.epoch, (), (), first, Usage(1))
        await self._decode(lambda stub: stub.Commit(commit_order_to_wire(order)))

    async def abort(self) -> None:
        """The end of a running request, in its router's name."""
        order = RouterAbort(self.request_id, 1, "forged", self.router_id)
        order = self.signatures.abort(order, _life(self.beats["decode"]))

        async def end(stub: Any) -> None:
            answer = await stub.Abort(abort_order_to_wire(order))
            assert answer.was_known

        await self._decode(end)

    async def detach(self) -> None:
        """A running request stands still, and waits for an order to move it."""
        decode = self.beats["decode"]
        named = self.request_id, 1, self.router_id
        asked = decode_pb2.DetachRequest(
            request_id=self.request_id,
            attempt=1,
            router_id=self.router_id,
            worker_epoch=decode.epoch,
            signature=self.signatures.detach(*named, _life(decode)),
        )
        await self._decode(lambda stub: stub.Detach(asked))

    async def hand_off(self) -> None:
        """A running request goes to a worker of the caller's choice, with its state."""
        decode = self.beats["decode"]
        order = PrefillOrder(
            context=replace(self._context(), request_id=self.request_id, attempt=2),
            worker_epoch=decode.epoch,
            decode=WorkerAddress("decode-" + 16 * "0", "127.0.0.1:1", 1),
            router_id=self.router_id,
            request=replace(self._request(), request_id=self.request_id, num_generated=1),
            manifest_digest=decode.state.digest,
        )
        signed = self.signatures.attempt(order, _address(decode), is_move=True)

        async def read(stub: Any) -> None:
            async for _ in stub.HandOff(hand_off_order_to_wire(signed), timeout=CALL_SECONDS):
                pass

        await self._decode(read)

    async def abort_writing(self) -> None:
        """The end of another's reservation, in its writer's name."""
        order = WriterAbort(self.request_id, self._fence, "forged")
        await self._decode(lambda stub: stub.Abort(abort_order_to_wire(order)))

    async def read_tokens(self) -> None:
        """The tokens of a running request, which belong to its router; returns when it has some."""
        asked = decode_pb2.TokensRequest(
            router_id=self.router_id,
            worker_epoch=self.beats["decode"].epoch,
            resume=[cursor_to_wire(TokenCursor(self.request_id, 1, 0))],
            signature=self.signatures.tokens(self.router_id, _life(self.beats["decode"])),
        )

        async def read(stub: Any) -> None:
            call = stub.Tokens(asked, timeout=CALL_SECONDS)
            frame = await anext(aiter(call))
            call.cancel()
            assert self.request_id in {each.request_id for each in frame.requests}

        await self._decode(read)

    async def attach(self) -> None:
        """The place of the arena, where all state of the node lies."""
        await self._host_cache(lambda stub: stub.Attach(hostcache_pb2.AttachRequest()))

    async def fetch(self) -> None:
        """Stored state, as another node gets it."""

        async def read(stub: Any) -> None:
            request = hostcache_pb2.FetchRequest(epoch=self.beats["hostcache"].epoch)
            async for _ in stub.Fetch(request, timeout=CALL_SECONDS):
                pass

        await self._host_cache(read)

    async def look_up(self) -> None:
        """The units of a chain that a node holds."""

        async def read(stub: Any) -> None:
            request = hostcache_pb2.LookupRequest(epoch=self.beats["hostcache"].epoch)
            await stub.Lookup(request, timeout=CALL_SECONDS)

        await self._host_cache(read)

    async def deposit(self) -> None:
        """State of the caller's making, under keys of its choice."""

        async def write(stub: Any) -> None:
            order = hostcache_pb2.DepositOrder(epoch=self.beats["hostcache"].epoch)
            orders = iter([hostcache_pb2.DepositRequest(order=order)])
            async for _ in stub.Deposit(orders, timeout=CALL_SECONDS):
                pass

        await self._host_cache(write)

    # Parts of orders.

    @property
    def _fence(self) -> WriteFence:
        return WriteFence(self.beats["decode"].epoch, GUESSED, 1)

    def _context(self) -> RequestContext:
        return RequestContext(f"forged-{uuid4().hex[:8]}", 1, 20.0)

    def _request(self) -> Request:
        tokens, state = as_token_ids(TOKENS), self.beats["prefill"].state
        keys = page_keys(root_key(state), tokens, state.page_size)
        sampling = SamplingParams(max_tokens=2, temperature=0.0)
        return Request(f"forged-{uuid4().hex[:8]}", tokens, keys, sampling)

    async def _decode(self, call: Callable[[Any], Awaitable[Any]]) -> None:
        async with channel(self.beats["decode"].address, self.token) as way:
            await _called(call, DecodeServiceStub(way))

    async def _host_cache(self, call: Callable[[Any], Awaitable[Any]]) -> None:
        async with channel(self.beats["hostcache"].address, self.token) as way:
            await _called(call, HostCacheServiceStub(way))


async def _called(call: Callable[[Any], Awaitable[Any]], stub: Any) -> None:
    """Makes a call, again if gRPC lost its refusal: one that meets the first message on its way."""
    for is_last in (False, False, True):
        try:
            with typed_errors():
                await call(stub)
            return
        except Unreachable:
            if is_last:
                raise


def _life(beat: Heartbeat) -> WorkerLife:
    return WorkerLife(beat.worker_id, beat.epoch)


def _address(beat: Heartbeat) -> WorkerAddress:
    return WorkerAddress(beat.worker_id, beat.address, beat.epoch)


async def forge_units(
    url: str, login: Login, beats: Mapping[str, Heartbeat], tenant_salt: bytes
) -> None:
    """All state of TOKENS, said in the index to be at a node that nobody of the cluster is."""
    state = beats["prefill"].state
    keys = page_keys(root_key(state, tenant_salt), as_token_ids(TOKENS), state.page_size)
    node = NodeLife("forger", 1, "127.0.0.1:1")
    units = [IndexedUnit(kind, key, 1, bytes(16)) for kind in state.kinds for key in keys]
    async with redis_index(url, STRANGERS_KEY, login=login, lookup_seconds=60) as index:
        await index.announce(node, 60)
        await index.commit(node, keys[0], Tier.HOST, units)
        assert await index.usable_pages(keys, state.resume_shape), "it is there"
