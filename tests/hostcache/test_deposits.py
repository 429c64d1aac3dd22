"""Units that a router deposits: there as a whole or not at all, whatever ends the call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
import xxhash
from tests.hostcache.attached import (
    AttachedTestWorker,
    StoredPrompt,
    load,
    prompt_of,
    read_all,
    worker_at,
)
from tests.hostcache.conftest import StartHostCache
from tests.tiers.state_shapes import chain, manifest_of
from tests.waiting import until

from ferryman.cache.manifest import Kind
from ferryman.errors import (
    CorruptState,
    FerrymanError,
    InvalidRequest,
    ManifestMismatch,
    QueueFull,
    Unavailable,
    WrongEpoch,
)
from ferryman.handoff.values import ranges_of
from ferryman.wire.codec.handoff import range_to_wire
from ferryman.wire.grpc.rpc import channel, ending
from ferryman.wire.grpc.status import typed_errors
from ferryman.wire.v1 import hostcache_pb2 as pb
from ferryman.wire.v1.hostcache_pb2_grpc import HostCacheServiceStub
from ferryman_hostcache.service import RunningHostCache

MANIFEST = manifest_of(Kind.FULL, Kind.WINDOW, Kind.RECURRENT)
PROMPT = prompt_of(MANIFEST, chain(*range(1, 9)), snapshots=[3, 7], with_windows=True)
PIECE = 100  # bytes of a piece: no unit is a multiple of it


class Depositor:
    """A router's side of one call."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def begin(self, order: pb.DepositOrder) -> None:
        await self._call.write(pb.DepositRequest(order=order))
        await self.read()

    async def send(self, pieces: Iterator[pb.DepositPiece]) -> None:
        for piece in pieces:
            await self._call.write(pb.DepositRequest(piece=piece))

    async def finish(self) -> pb.DepositResponse:
        await self._call.done_writing()
        answer: pb.DepositResponse = await self.read()
        return answer

    async def read(self) -> Any:
        """The next answer; raises the error with which the call has ended."""
        with typed_errors():
            answer = await self._call.read()
            if answer is not grpc.aio.EOF:
                return answer
            code, details = await self._call.code(), await self._call.details()
            trailers = await self._call.trailing_metadata()
            raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailers, details)


@asynccontextmanager
async def depositor(service: RunningHostCache) -> AsyncIterator[Depositor]:
    async with channel(service.address) as way:
        with ending(HostCacheServiceStub(way).Deposit(timeout=60)) as call:
            yield Depositor(call)


@asynccontextmanager
async def laid_out(
    start: StartHostCache, **settings: Any
) -> AsyncIterator[tuple[RunningHostCache, AttachedTestWorker]]:
    async with (
        start(**settings) as service,
        worker_at(service.address, MANIFEST) as worker,
    ):
        yield service, worker


def order_for(service: RunningHostCache, prompt: StoredPrompt = PROMPT) -> pb.DepositOrder:
    return pb.DepositOrder(
        epoch=service.host.identity.epoch,
        manifest_digest=MANIFEST.digest,
        page_keys=b"".join(prompt.keys),
        units=[range_to_wire(span) for span in ranges_of(prompt.names)],
    )


def pieces_of(prompt: StoredPrompt = PROMPT) -> Iterator[pb.DepositPiece]:
    for kind, page in sorted(prompt.names):
        content = prompt.content(kind, page)
        for begin in range(0, len(content), PIECE):
            data = content[begin : begin + PIECE]
            is_last = begin + PIECE >= len(content)
            digest = xxhash.xxh3_128_digest(content) if is_last else b""
            yield pb.DepositPiece(data=data, digest=digest)


async def deposit(service: RunningHostCache, prompt: StoredPrompt = PROMPT) -> pb.DepositResponse:
    async with depositor(service) as router:
        await router.begin(order_for(service, prompt))
        await router.send(pieces_of(prompt))
        return await router.finish()


def holds_nothing(service: RunningHostCache) -> bool:
    """Neither units nor room for any."""
    kinds = service.host.store.statistics().kinds.values()
    return all(kind.free == kind.total for kind in kinds)


async def test_a_deposit_is_read_as_what_a_worker_stored(start_host_cache: StartHostCache) -> None:
    async with laid_out(start_host_cache) as (service, worker):
        answer = await deposit(service)
        assert (answer.usable_pages, answer.stored_units) == (8, len(PROMPT.names))
        lease = await load(worker, PROMPT)
        assert lease.usable_pages == 8
        assert read_all(worker, PROMPT, lease) >= 8
        worker.client.release(lease)
        again = await deposit(service)
        assert (again.usable_pages, again.stored_units) == (8, 0)


async def test_nothing_is_visible_before_the_last_unit(start_host_cache: StartHostCache) -> None:
    async with laid_out(start_host_cache) as (service, worker), depositor(service) as router:
        await router.begin(order_for(service))
        pieces = list(pieces_of())
        await router.send(iter(pieces[:-1]))
        assert not any(service.host.store.lookup(PROMPT.keys).pages.values())
        assert (await load(worker, PROMPT)).usable_pages == 0
        await router.send(iter(pieces[-1:]))
        assert (await router.finish()).usable_pages == 8


def _cut(pieces: list[pb.DepositPiece]) -> None:
    del pieces[-1]


def _flipped(pieces: list[pb.DepositPiece]) -> None:
    pieces[-1].data = bytes([pieces[-1].data[0] ^ 1]) + pieces[-1].data[1:]


def _longer(pieces: list[pb.DepositPiece]) -> None:
    pieces[0].data += bytes(MANIFEST.layout(Kind.FULL).slot_bytes)


def _digest_too_early(pieces: list[pb.DepositPiece]) -> None:
    pieces[0].digest = bytes(16)


def _without_digest(pieces: list[pb.DepositPiece]) -> None:
    pieces[-1].digest = b""


def _empty(pieces: list[pb.DepositPiece]) -> None:
    pieces[0].data = b""


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (_cut, InvalidRequest),
        (_flipped, CorruptState),
        (_longer, InvalidRequest),
        (_digest_too_early, InvalidRequest),
        (_without_digest, InvalidRequest),
        (_empty, InvalidRequest),
    ],
)
async def test_other_bytes_than_ordered_leave_nothing(
    start_host_cache: StartHostCache, spoil: Any, error: type[FerrymanError]
) -> None:
    async with laid_out(start_host_cache) as (service, _):
        pieces = list(pieces_of())
        spoil(pieces)
        async with depositor(service) as router:
            await router.begin(order_for(service))
            await router.send(iter(pieces))
            with pytest.raises(error):
                await router.finish()
        assert holds_nothing(service)


async def test_a_router_that_dies_leaves_nothing(start_host_cache: StartHostCache) -> None:
    async with laid_out(start_host_cache) as (service, _):
        async with depositor(service) as router:
            await router.begin(order_for(service))
            await router.send(iter(list(pieces_of())[:5]))
            assert not holds_nothing(service)
        await until(lambda: holds_nothing(service))
        assert not len(service.lower_tiers.deposits)


async def test_of_too_many_pages_those_stay_that_can_be_resumed_from(
    start_host_cache: StartHostCache,
) -> None:
    # Room for fewer full pages than there are, and for the first snapshot's.
    long = prompt_of(MANIFEST, chain(*range(1, 402)), snapshots=[3, 400], with_windows=True)
    async with laid_out(start_host_cache, memory_bytes=128 << 10) as (service, worker):
        answer = await deposit(service, long)
        assert answer.usable_pages == 4
        lease = await load(worker, long)
        assert lease.usable_pages == 4
        assert read_all(worker, long, lease)
        worker.client.release(lease)


async def test_a_deposit_lives_as_long_as_its_call(start_host_cache: StartHostCache) -> None:
    """Its lease is prolonged by every tick, however slowly the bytes come."""
    async with laid_out(start_host_cache) as (service, _), depositor(service) as router:
        await router.begin(order_for(service))
        (reservation,) = service.host.store._writers
        end = reservation.end
        service.lower_tiers.tick()
        assert reservation.end > end
        await router.send(pieces_of())
        assert (await router.finish()).usable_pages == 8


async def test_an_order_that_cannot_be_carried_out_is_refused_before_any_byte(
    start_host_cache: StartHostCache,
) -> None:
    async def error_of(service: RunningHostCache, order: pb.DepositOrder) -> FerrymanError:
        async with depositor(service) as router:
            with pytest.raises(FerrymanError) as caught:
                await router.begin(order)
        return caught.value

    async with laid_out(start_host_cache) as (service, _):
        other = order_for(service)
        other.manifest_digest = manifest_of(Kind.FULL).digest
        assert isinstance(await error_of(service, other), ManifestMismatch)
        old = order_for(service)
        old.epoch -= 1
        assert isinstance(await error_of(service, old), WrongEpoch)
        none = pb.DepositOrder(epoch=service.host.identity.epoch, manifest_digest=MANIFEST.digest)
        assert isinstance(await error_of(service, none), InvalidRequest)
        service.host.drop_chain(PROMPT.keys[0])
        assert isinstance(await error_of(service, order_for(service)), Unavailable)
        async with depositor(service) as router:
            await router.send(iter([pb.DepositPiece()]))
            with pytest.raises(InvalidRequest, match="begins with its order"):
                await router.finish()
        assert holds_nothing(service)


async def test_a_third_deposit_waits_for_another_time(start_host_cache: StartHostCache) -> None:
    async with laid_out(start_host_cache) as (service, _):
        async with depositor(service) as first, depositor(service) as second:
            await asyncio.gather(*(router.begin(order_for(service)) for router in (first, second)))
            async with depositor(service) as third:
                with pytest.raises(QueueFull):
                    await third.begin(order_for(service))
        await until(lambda: not len(service.lower_tiers.deposits))
        assert (await deposit(service)).usable_pages == 8
