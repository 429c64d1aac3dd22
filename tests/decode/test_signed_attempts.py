"""Signed attempts at a decode worker of a locked cluster: late, twice, elsewhere, after the end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest
from tests.cluster_keys import KEY
from tests.harness.pair import PairWorker, WorkerPair, pair_of_workers, paired, request, worker
from tests.harness.pair.fake_engine import MANIFEST, PAGE_SIZE, fake_engine
from tests.harness.pair.worker import open_gate, worker_on
from tests.waiting import until

from ferryman.cache.keys import page_keys, root_key
from ferryman.errors import (
    FerrymanError,
    LeaseLost,
    PermissionDenied,
    Stale,
    Unavailable,
    WrongEpoch,
)
from ferryman.handoff.usage import NONE_CACHED
from ferryman.schedule.batch import Sampled
from ferryman.schedule.limits import IN_TURNS
from ferryman.schedule.request import Request
from ferryman.security.credentials import ClusterRole, credentials_of
from ferryman.tiers.values import WorkerLife
from ferryman.wire.codec.handoff import commit_order_to_wire, hand_off_order_to_wire
from ferryman.wire.grpc.role_tokens import GrpcAccess
from ferryman.wire.grpc.status import typed_errors
from ferryman.wire.signed_orders import RouterSignatures
from ferryman.wire.v1 import decode_pb2
from ferryman.wire.values import (
    AttemptSignature,
    CommitOrder,
    PrefillOrder,
    RequestContext,
    ReserveOrder,
    RouterAbort,
    TokenCursor,
    Usage,
    WorkerAddress,
)
from ferryman.worker.worker_app import WorkerContext
from ferryman_both.server import BothServicer
from ferryman_decode.requests import LINGER_SECONDS
from ferryman_decode.server import DecodeServicer
from ferryman_prefill.server import PrefillServicer

PROMPT = [3] * 21
ASKED = request("r1", PROMPT, max_tokens=4)


def access(role: ClusterRole) -> GrpcAccess:
    return GrpcAccess(credentials_of(KEY, role))


def locked_decode(parts: WorkerContext) -> DecodeServicer:
    return DecodeServicer(replace(parts, access=access(ClusterRole.DECODE)))


def locked_prefill(parts: WorkerContext) -> PrefillServicer:
    return PrefillServicer(replace(parts, access=access(ClusterRole.PREFILL)))


def locked_both(parts: WorkerContext) -> BothServicer:
    return BothServicer(replace(parts, access=access(ClusterRole.BOTH)))


def address_of(at: PairWorker) -> WorkerAddress:
    return WorkerAddress(at.parts.worker_id, at.address, at.parts.epoch)


@dataclass(frozen=True)
class LockedPair:
    """Two workers that obey signed orders alone, and their router."""

    workers: WorkerPair
    router: RouterSignatures = field(
        default_factory=lambda: RouterSignatures(access(ClusterRole.ROUTER))
    )

    def order(self, asked: Request, attempt: int = 1, deadline: float = 60.0) -> PrefillOrder:
        order = self.workers.order(asked, attempt, deadline)
        return self.router.attempt(order, address_of(self.workers.prefill), is_move=False)

    def wish(self, asked: Request, attempt: int = 1, deadline: float = 60.0) -> ReserveOrder:
        """As the prefill worker would pass the order on."""
        wish = self.workers.wish(asked, attempt, deadline)
        signature = self.order(asked, attempt, deadline).signature
        return replace(wish, writer=address_of(self.workers.prefill), signature=signature)

    def move_to_nobody(self, asked: Request, attempt: int) -> PrefillOrder:
        """A detached request goes on at a worker that does not answer."""
        source = self.workers.decode
        ids = source.engine.scheduler.known_tokens("r1.1")
        num_generated = len(ids) - asked.prompt_len
        keys = page_keys(root_key(MANIFEST), ids, PAGE_SIZE)
        request = replace(asked, token_ids=ids, keys=keys, num_generated=num_generated)
        order = PrefillOrder(
            RequestContext("r1", attempt, 60.0),
            source.parts.epoch,
            WorkerAddress("decode-00000009", "127.0.0.1:1", 9),
            "router-1",
            request,
            self.workers.digest,
        )
        return self.router.attempt(order, address_of(source), is_move=True)

    async def hand_off(self, order: PrefillOrder) -> None:
        with typed_errors():
            async for _ in self.workers.decode_stub.HandOff(hand_off_order_to_wire(order)):
                pass

    async def detach(self, request_id: str, attempt: int) -> None:
        parts = self.workers.decode.parts
        life = WorkerLife(parts.worker_id, parts.epoch)
        message = decode_pb2.DetachRequest(
            request_id=request_id,
            attempt=attempt,
            router_id="router-1",
            worker_epoch=parts.epoch,
            signature=self.router.detach(request_id, attempt, "router-1", life),
        )
        with typed_errors():
            await self.workers.decode_stub.Detach(message)

    async def refuses(self, wish: ReserveOrder, error: type[FerrymanError]) -> None:
        with pytest.raises(error):
            await self.workers.reserve(wish)

    async def abort(self, request_id: str, attempt: int) -> None:
        decode = self.workers.decode.parts
        order = RouterAbort(request_id, attempt, "client_gone", "router-1")
        life = WorkerLife(decode.worker_id, decode.epoch)
        answer = await self.workers.abort(self.router.abort(order, life))
        assert answer.was_known


@asynccontextmanager
async def locked_pair() -> AsyncIterator[LockedPair]:
    async with pair_of_workers(locked_decode, make_prefill=locked_prefill) as workers:
        yield LockedPair(workers)


async def test_a_signed_order_is_carried_out_and_an_unsigned_one_by_neither() -> None:
    async with locked_pair() as pair:
        unsigned = replace(pair.order(ASKED), signature=AttemptSignature())
        with pytest.raises(PermissionDenied):
            await pair.workers.run_prefill(unsigned)
        await pair.refuses(
            replace(pair.wish(ASKED), signature=AttemptSignature()), PermissionDenied
        )
        assert pair.workers.prefill.events() == pair.workers.decode.events() == []
        await pair.workers.run_prefill(pair.order(ASKED))
        await until(lambda: bool(pair.workers.decode.facts("finished")))


async def test_an_order_to_an_earlier_life_is_no_refused_call() -> None:
    """After a restart the router asks the new process what it signed for the one before."""
    async with locked_pair() as pair:
        prefill, decode = pair.workers.prefill, pair.workers.decode
        before = replace(address_of(prefill), epoch=prefill.parts.epoch - 1)
        order = replace(pair.workers.order(ASKED), worker_epoch=before.epoch)
        with pytest.raises(WrongEpoch):
            await pair.workers.run_prefill(pair.router.attempt(order, before, is_move=False))
        before = replace(address_of(decode), epoch=decode.parts.epoch - 1)
        order = replace(order, worker_epoch=before.epoch)
        move = hand_off_order_to_wire(pair.router.attempt(order, before, is_move=True))
        with pytest.raises(WrongEpoch), typed_errors():
            async for _ in pair.workers.decode_stub.HandOff(move):
                pass


async def test_a_prompt_is_computed_once_for_each_signature() -> None:
    """Also where decode would not refuse a second one, because it has never heard of the first."""
    async with locked_pair() as pair:
        order = pair.order(ASKED)
        await pair.workers.run_prefill(order)
        before = pair.workers.prefill.events()
        with pytest.raises(Stale, match="has been here"):
            await pair.workers.run_prefill(order)
        assert pair.workers.prefill.events() == before


async def test_an_order_to_hand_off_is_carried_out_once_though_the_state_is_still_there() -> None:
    """Its first try failed, and its router goes on by an attempt of another number."""
    asked = request("r1", PROMPT, max_tokens=30)
    async with locked_pair() as pair:
        source = pair.workers.decode
        source.hold()
        await pair.workers.run_prefill(pair.order(asked))
        await pair.detach("r1", 1)
        source.go_on()
        await until(lambda: bool(source.facts("detached")))
        second = pair.move_to_nobody(asked, attempt=2)
        with pytest.raises(Unavailable):
            await pair.hand_off(second)
        with pytest.raises(Stale, match="has been here"):
            await pair.hand_off(second)
        assert len(source.facts("moving")) == 1
        with pytest.raises(Unavailable):
            await pair.hand_off(pair.move_to_nobody(asked, attempt=3))
        assert len(source.facts("moving")) == 2


async def test_asked_twice_a_reservation_is_the_same() -> None:
    async with locked_pair() as pair:
        wish = pair.wish(ASKED)
        first, second = await pair.workers.reserve(wish), await pair.workers.reserve(wish)
        assert first.reservation_id == second.reservation_id
        # The same attempt, signed anew: its router would never do that.
        await pair.refuses(pair.wish(ASKED), PermissionDenied)
        await pair.abort("r1", 1)


async def test_it_is_of_no_use_at_another_decode_worker() -> None:
    async with (
        locked_pair() as pair,
        worker("decode", locked_decode) as other,
        paired(pair.workers.prefill, other) as elsewhere,
    ):
        stray = replace(pair.wish(ASKED), worker_epoch=other.parts.epoch)
        with pytest.raises(PermissionDenied):
            await elsewhere.reserve(stray)
        assert other.events() == []


async def test_after_its_abort_it_does_not_come_again() -> None:
    async with locked_pair() as pair:
        wish = pair.wish(ASKED)
        await pair.workers.reserve(wish)
        await pair.abort("r1", 1)
        await pair.refuses(wish, Stale)
        pair.workers.decode.clock.ahead = 2 * LINGER_SECONDS  # its tombstone is gone
        await pair.refuses(wish, Stale)


async def test_after_its_end_it_does_not_come_again() -> None:
    """Not even when the worker has forgotten it, and it would have had time left."""
    async with locked_pair() as pair:
        order = pair.order(ASKED, deadline=1000.0)
        wish = replace(pair.wish(ASKED, deadline=1000.0), signature=order.signature)
        await pair.workers.run_prefill(order)
        await until(lambda: bool(pair.workers.decode.facts("finished")))
        await pair.refuses(wish, Stale)
        pair.workers.decode.clock.ahead = LINGER_SECONDS + 1
        requests, cursor = pair.workers.decode.service.requests, TokenCursor("r1", 1, 0)
        await until(lambda: not requests.since([cursor]))
        await pair.refuses(wish, Stale)
        assert len(pair.workers.decode.facts("reserved")) == 1


async def test_an_attempt_comes_too_late_when_later_ones_are_long_past() -> None:
    async with locked_pair() as pair:
        early = pair.wish(ASKED, deadline=60.0)
        await pair.workers.run_prefill(pair.order(request("r2", PROMPT, max_tokens=4)))
        pair.workers.decode.clock.ahead = 90.0
        await pair.refuses(early, Stale)
        await pair.workers.reserve(pair.wish(ASKED))
        await pair.abort("r1", 1)


async def test_a_commit_is_of_the_attempt_that_was_reserved_for() -> None:
    async with locked_pair() as pair:
        wish = pair.wish(ASKED)
        answer = await pair.workers.reserve(wish)
        commit = CommitOrder(
            wish.context,
            answer.reservation_id,
            answer.epoch,
            (),
            (),
            Sampled(7, {}),
            Usage(21, cached=NONE_CACHED),
            wish.signature.value,
        )
        for other in (b"", pair.wish(ASKED).signature.value):
            with pytest.raises(PermissionDenied), typed_errors():
                await pair.workers.decode_stub.Commit(
                    commit_order_to_wire(replace(commit, signature=other))
                )
        assert await pair.workers.reserve(wish) == answer, "nothing has changed"
        await pair.abort("r1", 1)
        with pytest.raises(LeaseLost), typed_errors():
            await pair.workers.decode_stub.Commit(commit_order_to_wire(commit))


async def test_a_worker_that_does_both_begins_an_attempt_once() -> None:
    """It has no reservations to remember attempts by."""
    with fake_engine(order=IN_TURNS) as engine:
        async with (
            worker_on(engine, "both", locked_both, gate=open_gate()) as both,
            paired(both, both) as workers,
        ):
            pair = LockedPair(workers)
            order = pair.order(ASKED, deadline=1000.0)
            await workers.run_prefill(order)
            await until(lambda: bool(both.facts("finished")))
            both.clock.ahead = LINGER_SECONDS + 1
            requests, cursor = both.service._decode.requests, TokenCursor("r1", 1, 0)
            await until(lambda: not requests.since([cursor]))
            with pytest.raises(Stale, match="has been here"):
                await workers.run_prefill(order)
