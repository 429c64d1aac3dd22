"""A draining worker's requests leave it with their state: nothing is computed again.

Each order is tried in time, late, twice, and forged.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from tests.decode.test_quarantine import OvertakesItself
from tests.harness.pair import (
    MANIFEST,
    PAGE_SIZE,
    PairWorker,
    WorkerPair,
    expected,
    pair_of_workers,
    paired,
    request,
    worker,
)
from tests.waiting import until
from tests.worker.late_agents import late_agent_in

from ferryman.cache.keys import page_keys, root_key
from ferryman.errors import InvalidRequest, LeaseLost, NotFound, OutOfSlots, Stale, WrongEpoch
from ferryman.wire.codec.handoff import hand_off_order_to_wire, hand_off_progress_from_wire
from ferryman.wire.grpc.status import typed_errors
from ferryman.wire.handoff.nixl_library import has_nixl
from ferryman.wire.plane_values import PlaneChoice
from ferryman.wire.v1 import decode_pb2, prefill_pb2, prefill_pb2_grpc
from ferryman.wire.values import (
    Failure,
    PrefillHandedOff,
    PrefillOrder,
    PrefillProgress,
    RequestContext,
    RouterAbort,
    WorkerAddress,
)
from ferryman.worker.worker_app import WorkerContext
from ferryman_decode import departures
from ferryman_decode.server import DecodeServicer

PROMPT = [3] * 21
ASKED = request("r1", PROMPT, max_tokens=30)


@dataclass(frozen=True, slots=True)
class Leaving:
    """A request that decodes at `pair.decode`, and the worker that shall go on with it."""

    pair: WorkerPair
    taker: PairWorker
    taken: WorkerPair

    @property
    def source(self) -> PairWorker:
        return self.pair.decode

    async def detach(self, *, attempt: int = 1, router: str = "router-1", epoch: int = 0) -> None:
        message = decode_pb2.DetachRequest(
            request_id="r1",
            attempt=attempt,
            router_id=router,
            worker_epoch=epoch or self.source.parts.epoch,
        )
        with typed_errors():
            await self.pair.decode_stub.Detach(message)

    async def detached(self) -> list[int]:
        """The tokens that were drawn before the request stood still."""
        await self.detach()
        self.source.go_on()
        tokens, last = await self.pair.read_tokens("r1")
        assert isinstance(last.ending, Failure)
        assert last.ending.reason == "RequestDetached"
        return tokens

    def order(self, tokens: list[int], attempt: int = 2) -> PrefillOrder:
        """The router's order behind all tokens it was told."""
        ids = np.array([*PROMPT, *tokens], dtype="<u4")
        keys = page_keys(root_key(MANIFEST), ids, PAGE_SIZE)
        asked = replace(ASKED, token_ids=ids, keys=keys, num_generated=len(tokens))
        parts = self.taker.parts
        where = WorkerAddress(parts.worker_id, self.taker.address, parts.epoch)
        epoch, digest = self.source.parts.epoch, self.pair.digest
        return PrefillOrder(
            RequestContext("r1", attempt, 60.0), epoch, where, "router-1", asked, digest
        )

    async def hand_off(self, order: PrefillOrder) -> list[PrefillProgress]:
        with typed_errors():
            call = self.pair.decode_stub.HandOff(hand_off_order_to_wire(order))
            return [hand_off_progress_from_wire(message) async for message in call]

    async def answer_at_taker(self, tokens: list[int]) -> None:
        """All tokens, the source's and the taker's, are those of one undisturbed process."""
        rest, _ = await self.taken.read_tokens("r1", attempt=2, base=len(tokens) - 1)
        # The token behind the hand-off is told again, as the first of the taker's.
        assert rest[0] == tokens[-1]
        assert [*tokens[:-1], *rest] == expected(ASKED)

    async def nothing_is_kept(self) -> None:
        for side in (self.source, self.taker):
            await until(lambda side=side: not side.leased())  # type: ignore[misc]
            side.engine.scheduler.check_integrity()


@asynccontextmanager
async def leaving(
    *,
    num_slots: int = 60,
    planes: PlaneChoice = "grpc",
    make_taker: Callable[[WorkerContext], Any] = DecodeServicer,
) -> AsyncIterator[Leaving]:
    """A request under way; its steps wait for `go_on`."""
    async with AsyncExitStack() as stack:
        pair = await stack.enter_async_context(pair_of_workers(planes=planes))
        taker = await stack.enter_async_context(worker("decode", make_taker, num_slots, planes))
        taken = await stack.enter_async_context(paired(pair.prefill, taker))
        pair.decode.hold()
        await pair.run_prefill(pair.order(ASKED))
        yield Leaving(pair, taker, taken)


async def test_a_request_goes_on_elsewhere_and_nothing_is_computed_again() -> None:
    async with leaving() as moved:
        tokens = await moved.detached()
        assert 1 <= len(tokens) < 30
        progress = await moved.hand_off(moved.order(tokens))
        assert isinstance(progress[-1], PrefillHandedOff)
        assert progress[-1].num_bytes > 0
        await moved.answer_at_taker(tokens)
        statistics = moved.taker.engine.scheduler.statistics()
        assert (statistics.prefill_steps, statistics.decode_steps > 0) == (0, True)
        assert moved.source.engine.scheduler.statistics().prefill_steps == 0
        await moved.nothing_is_kept()
        assert [fact["tokens"] for fact in moved.source.facts("detached")] == [len(tokens)]
        assert len(moved.source.facts("handed_off")) == 1


async def test_a_worker_that_drains_waits_for_requests_that_leave() -> None:
    async with leaving() as moved:
        tokens = await moved.detached()
        draining = moved.source.parts.background.start(moved.source.service.drain())
        for _ in range(10):  # as long as it would take without a request that leaves
            await asyncio.sleep(0)
        assert not draining.done()
        await moved.hand_off(moved.order(tokens))
        await draining
        await moved.answer_at_taker(tokens)


async def test_an_order_that_comes_twice_moves_the_request_once() -> None:
    async with leaving() as moved:
        await moved.detach()
        tokens = await moved.detached()
        await moved.detach()
        await moved.hand_off(moved.order(tokens))
        with pytest.raises(LeaseLost):
            await moved.hand_off(moved.order(tokens, attempt=3))
        await moved.answer_at_taker(tokens)
        await moved.nothing_is_kept()


async def test_state_for_which_no_order_comes_is_freed() -> None:
    async with leaving() as moved:
        tokens = await moved.detached()
        assert moved.source.leased()
        moved.source.clock.ahead += departures.HOLD_SECONDS
        await until(lambda: not moved.source.leased())
        with pytest.raises(LeaseLost):
            await moved.hand_off(moved.order(tokens))
        await moved.source.service.drain()
        statistics = moved.source.service._departures.statistics()
        assert (statistics.held, statistics.given_up, statistics.handed_off) == (0, 1, 0)


async def test_state_is_kept_for_its_time_and_no_longer() -> None:
    async with leaving() as moved:
        before = moved.source.clock()
        await moved.detached()
        kept = moved.source.service._departures
        (held,) = kept._held.values()
        assert 0.0 <= held.until - departures.HOLD_SECONDS - before < 120.0
        kept.expire(held.until - 0.001)
        assert (kept.statistics().held, kept.statistics().given_up) == (1, 0)
        kept.expire(held.until)
        assert (kept.statistics().held, kept.statistics().given_up) == (0, 1)


async def test_an_order_that_fails_leaves_the_state_for_another_one() -> None:
    async with leaving(num_slots=4) as moved:
        tokens = await moved.detached()
        with pytest.raises((OutOfSlots, InvalidRequest)):
            await moved.hand_off(moved.order(tokens))
        assert moved.source.service._departures.statistics().held == 1
        async with (
            worker("decode", DecodeServicer) as other,
            paired(moved.pair.prefill, other) as taken,
        ):
            again = Leaving(moved.pair, other, taken)
            await again.hand_off(again.order(tokens))
            await again.answer_at_taker(tokens)


async def test_state_whose_router_will_not_order_it_again_is_freed_at_once() -> None:
    """No time passes: without the router's word the worker keeps it for another order."""
    async with leaving(num_slots=4) as moved:
        tokens = await moved.detached()
        with pytest.raises((OutOfSlots, InvalidRequest)):
            await moved.hand_off(moved.order(tokens))
        await moved.pair.abort(RouterAbort("r1", 1, "attempt_lost", "router-1"))
        await moved.pair.abort(RouterAbort("r1", 2, "not_moved", "router-2"))
        statistics = moved.source.service._departures.statistics
        assert (statistics().held, statistics().given_up) == (1, 0)
        await moved.pair.abort(RouterAbort("r1", 2, "not_moved", "router-1"))
        assert (statistics().held, statistics().given_up) == (0, 1)
        await moved.nothing_is_kept()
        with pytest.raises(LeaseLost):
            await moved.hand_off(moved.order(tokens, attempt=3))


async def test_state_that_is_being_moved_when_its_router_gives_it_up_is_freed_behind_that() -> None:
    async with leaving(make_taker=OvertakesItself) as moved:
        tokens = await moved.detached()
        kept = moved.source.service._departures
        departure = kept.begin(moved.order(tokens))
        await moved.pair.abort(RouterAbort("r1", 2, "client_gone", "router-1"))
        assert kept.statistics().held == 1, "a departure still reads it"
        kept.ended(departure)
        assert (kept.statistics().held, kept.statistics().given_up) == (0, 1)
        await moved.nothing_is_kept()


async def test_only_its_own_router_may_have_a_request_leave() -> None:
    async with leaving() as moved:
        for forged in ({"router": "router-2"}, {"attempt": 2}):
            with pytest.raises(NotFound):
                await moved.detach(**forged)
        with pytest.raises(WrongEpoch):
            await moved.detach(epoch=1)
        assert moved.source.engine.scheduler.statistics().decoding == 1


@pytest.mark.parametrize(
    ("forged", "error"),
    [
        (lambda order: replace(order, router_id="router-2"), Stale),
        (lambda order: replace(order, worker_epoch=1), WrongEpoch),
        (lambda order: replace(order, context=replace(order.context, attempt=1)), Stale),
    ],
    ids=["another router", "another life", "an attempt that was"],
)
async def test_a_forged_order_takes_nothing_away(forged, error) -> None:  # type: ignore[no-untyped-def]
    async with leaving() as moved:
        tokens = await moved.detached()
        with pytest.raises(error):
            await moved.hand_off(forged(moved.order(tokens)))
        await moved.hand_off(moved.order(tokens))
        await moved.answer_at_taker(tokens)


async def test_an_order_with_other_tokens_is_refused() -> None:
    async with leaving() as moved:
        tokens = await moved.detached()
        with pytest.raises(Stale, match="other tokens"):
            await moved.hand_off(moved.order([*tokens[:-1], (tokens[-1] + 1) % 7]))
        await moved.hand_off(moved.order(tokens))
        await moved.answer_at_taker(tokens)


async def test_a_late_abort_of_the_attempt_that_was_leaves_its_state_alone() -> None:
    async with leaving() as moved:
        tokens = await moved.detached()
        await moved.pair.abort(RouterAbort("r1", 1, "attempt_lost", "router-1"))
        await moved.hand_off(moved.order(tokens))
        await moved.answer_at_taker(tokens)


# By NIXL, where the taker cannot refuse a late write.

with_nixl = pytest.mark.skipif(not has_nixl(), reason="NIXL is not installed")


@with_nixl
async def test_a_late_write_of_a_request_that_leaves_lands_in_quarantined_slots_only() -> None:
    """The taker gives the reservation up while it is written, and asks the leaving worker."""
    async with leaving(planes="nixl-unlocked") as moved:
        tokens = await moved.detached()
        transport = moved.source.service._departures._side.transport
        await transport.made()
        late = late_agent_in(transport)
        running = asyncio.create_task(moved.hand_off(moved.order(tokens)))
        await until(lambda: late.num_waiting > 0)
        answer = await moved.taken.abort(RouterAbort("r1", 2, "attempt_lost", "router-1"))
        assert answer.has_pending_writes
        assert "transfer_in" in moved.taker.leased()
        await asyncio.to_thread(late.arrive)
        with pytest.raises(LeaseLost):
            await running
        await until(lambda: not moved.taker.leased())
        await moved.hand_off(moved.order(tokens, attempt=3))
        rest, _ = await moved.taken.read_tokens("r1", attempt=3, base=len(tokens) - 1)
        assert [*tokens[:-1], *rest] == expected(ASKED)
        assert moved.source.facts("handed_off")[-1]["path"] == "nixl"
        await moved.nothing_is_kept()


@with_nixl
async def test_a_reservation_given_up_before_the_leaving_worker_knows_it_is_never_written() -> None:
    async with leaving(planes="nixl-unlocked", make_taker=OvertakesItself) as moved:
        tokens = await moved.detached()
        parts = moved.source.parts
        taker = moved.taker.service
        taker.prefill = prefill_pb2_grpc.PrefillServiceStub(parts.channels.to(moved.source.address))
        taker.epoch = parts.epoch
        with pytest.raises(LeaseLost, match="before it was known"):
            await moved.hand_off(moved.order(tokens))
        assert taker.answer.is_stopped


@with_nixl
async def test_a_worker_is_asked_to_stop_in_its_own_life_alone() -> None:
    async with leaving(planes="nixl-unlocked") as moved:
        stub = prefill_pb2_grpc.PrefillServiceStub(
            moved.pair.prefill.parts.channels.to(moved.source.address)
        )
        with pytest.raises(WrongEpoch), typed_errors():
            await stub.StopWriting(prefill_pb2.StopWritingRequest(worker_epoch=1))


@with_nixl
async def test_a_worker_that_will_drain_has_its_agent_before_requests_leave() -> None:
    async with leaving(planes="nixl-unlocked") as moved:
        transport = moved.source.service._departures._side.transport
        assert transport.planes == ("grpc",), "an agent takes memory, and is not needed yet"
        await moved.source.service.prepare_drain()
        assert transport.planes == ("nixl", "grpc")


@with_nixl
@pytest.mark.parametrize(("min_bytes", "path"), [(1 << 30, "grpc"), (1, "nixl")])
async def test_only_a_large_state_is_worth_the_first_connection_by_nixl(
    min_bytes: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(departures, "MIN_NIXL_BYTES", min_bytes)
    async with leaving(planes="nixl-unlocked-or-grpc") as moved:
        await until(lambda: moved.taker.service.load().planes[0] == "nixl")
        await moved.source.service.prepare_drain()
        tokens = await moved.detached()
        await moved.hand_off(moved.order(tokens))
        assert moved.source.facts("handed_off")[-1]["path"] == path
        await moved.answer_at_taker(tokens)
