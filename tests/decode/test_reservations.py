"""Reservations of decode: the same answer twice, refusals by fence, and slots that come back."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tests.harness.pair import PATIENT_SECONDS, WorkerPair, expected, pair_of_workers, request
from tests.refused_calls import answers_to
from tests.waiting import until

from ferryman.errors import LeaseLost, RequestIdInUse, Stale, WrongEpoch
from ferryman.handoff.effects import WriterId
from ferryman.wire.grpc.status import typed_errors
from ferryman.wire.v1 import decode_pb2, types_pb2

PROMPT = [1] * 13


def renewal(promise: decode_pb2.ReserveResponse) -> decode_pb2.RenewRequest:
    return decode_pb2.RenewRequest(
        reservation_id=promise.reservation_id, epoch=promise.epoch, attempt=1
    )


async def renewed(pair: WorkerPair, asked: decode_pb2.RenewRequest) -> decode_pb2.RenewResponse:
    with typed_errors():
        answer: decode_pb2.RenewResponse = await pair.decode_stub.Renew(
            asked, timeout=PATIENT_SECONDS
        )
    return answer


async def renewed_for_ever(pair: WorkerPair, asked: decode_pb2.RenewRequest) -> None:
    async with asyncio.timeout(2 * PATIENT_SECONDS):
        while True:
            await renewed(pair, asked)


async def test_a_repeated_reserve_is_answered_as_the_first_was() -> None:
    async with pair_of_workers() as pair:
        await pair.run_prefill(pair.order(request("r0", PROMPT)))
        await pair.read_tokens("r0")
        wish = pair.wish(request("r1", PROMPT))
        first, second = await pair.reserve(wish), await pair.reserve(wish)
        assert first == second
        full = next(each for each in first.wanted if each.kind == types_pb2.KIND_FULL)
        assert full.first_page == 3, "the first request left three pages here"


async def test_two_routers_with_one_id_are_two_requests() -> None:
    """The second is refused: it would be given the reservation, and the answer, of the first."""
    async with pair_of_workers() as pair:
        wish = pair.wish(request("r1", PROMPT))
        first = await pair.reserve(wish)
        others = replace(wish, router_id="router-9", request=request("r1", [2] * 13))
        for attempt in (1, 2):
            context = replace(others.context, attempt=attempt)
            with pytest.raises(RequestIdInUse, match="another router"):
                await pair.reserve(replace(others, context=context))
        assert await pair.reserve(wish) == first, "the first goes on"


async def test_a_second_router_that_asks_meanwhile_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its Reserve was let in before the first one was promised anything."""
    async with pair_of_workers() as pair:
        wish = pair.wish(request("r1", PROMPT))
        others = replace(wish, router_id="router-9", request=request("r1", [2] * 13))
        receiver = type(pair.decode.service._nixl_receiver)
        is_let_in, may_go_on = asyncio.Event(), asyncio.Event()

        async def waits(_: object, writer: WriterId) -> None:
            if not is_let_in.is_set():
                is_let_in.set()
                await may_go_on.wait()

        monkeypatch.setattr(receiver, "close_other_lives", waits)
        late = asyncio.create_task(pair.reserve(others))
        await is_let_in.wait()
        first = await pair.reserve(wish)
        may_go_on.set()
        with pytest.raises(RequestIdInUse, match="another router"):
            await late
        assert await pair.reserve(wish) == first


async def test_two_routers_with_one_id_at_one_prefill_worker_at_once() -> None:
    """The second is told at once that its id is taken, and the first goes on."""
    async with pair_of_workers() as pair:
        pair.prefill.hold()
        asked = request("r1", PROMPT)
        first = asyncio.create_task(pair.run_prefill(pair.order(asked)))
        await until(lambda: bool(pair.prefill.facts("queued")))
        others = replace(pair.order(request("r1", [2] * 13)), router_id="router-9")
        with pytest.raises(RequestIdInUse, match="for another router"):
            await pair.run_prefill(others)
        with pytest.raises(Stale, match="runs here already") as caught:
            await pair.run_prefill(pair.order(asked))
        assert type(caught.value) is Stale, "its own router sent it twice"
        pair.prefill.go_on()
        await first
        tokens, _ = await pair.read_tokens("r1")
        assert tokens == expected(asked)


async def test_what_decode_holds_already_is_not_sent_and_counted() -> None:
    async with pair_of_workers() as pair:
        for name in ("r0", "r1"):
            await pair.run_prefill(pair.order(request(name, PROMPT)))
            await pair.read_tokens(name)
        said = pair.prefill.facts("handed_off")
        assert [facts["superfluous"] for facts in said] == [0, 4], "three pages, one of the window"
        metrics = pair.decode.parts.metrics.render().decode()
        assert "ferryman_decode_reservations_skipped_units 0.0" in metrics


async def test_a_lease_that_is_over_frees_every_slot() -> None:
    async with pair_of_workers() as pair:
        promise = await pair.reserve(pair.wish(request("r1", PROMPT)))
        assert pair.decode.leased() == {"transfer_in"}
        pair.decode.clock.ahead = PATIENT_SECONDS + 1
        await until(lambda: not pair.decode.leased())
        with pytest.raises(LeaseLost):
            await renewed(pair, renewal(promise))
        pair.decode.engine.scheduler.check_integrity()


async def test_a_message_with_a_stale_fence_is_refused() -> None:
    async with pair_of_workers() as pair:
        promise = await pair.reserve(pair.wish(request("r1", PROMPT)))
        asked = renewal(promise)
        asked.epoch += 1
        with pytest.raises(WrongEpoch):
            await renewed(pair, asked)
        asked = renewal(promise)
        asked.attempt = 2
        with pytest.raises(LeaseLost):
            await renewed(pair, asked)
        await renewed(pair, renewal(promise))
        wish = pair.wish(request("r2", PROMPT))
        with pytest.raises(WrongEpoch):
            await pair.reserve(replace(wish, worker_epoch=wish.worker_epoch + 1))


async def test_a_piece_for_another_generation_of_a_slot_is_refused() -> None:
    async with pair_of_workers() as pair:
        promise = await pair.reserve(pair.wish(request("r1", PROMPT)))
        wanted = promise.wanted[0]
        header = decode_pb2.WriteHeader(
            reservation_id=promise.reservation_id,
            epoch=promise.epoch,
            request_id="r1",
            attempt=1,
            manifest_digest=pair.digest,
        )
        piece = decode_pb2.UnitPiece(
            kind=wanted.kind,
            page_index=wanted.first_page,
            generation=wanted.generations[0] + 1,
            data=b"\x01" * 8,
        )
        messages = [
            decode_pb2.WritePagesRequest(header=header),
            decode_pb2.WritePagesRequest(pieces=[piece]),
        ]
        with pytest.raises(Stale, match="generation"):
            await answers_to(
                pair.decode.address,
                "",
                "/ferryman.wire.v1.DecodeService/WritePages",
                [message.SerializeToString() for message in messages],
            )


async def test_a_newer_attempt_ends_the_older_wherever_it_stands() -> None:
    async with pair_of_workers() as pair:
        first = request("r1", PROMPT, max_tokens=40)
        await pair.reserve(pair.wish(first))
        await pair.reserve(pair.wish(first, attempt=2))
        assert pair.decode.engine.scheduler.statistics().reserved == 1
        with pytest.raises(Stale):
            await pair.reserve(pair.wish(first))


async def test_an_attempt_that_decodes_ends_when_the_next_reserves() -> None:
    async with pair_of_workers() as pair:
        pair.decode.hold()
        asked = request("r1", PROMPT, max_tokens=40)
        await pair.run_prefill(pair.order(asked))
        assert pair.decode.engine.scheduler.statistics().decoding == 1
        await pair.reserve(pair.wish(asked, attempt=2))
        assert pair.decode.engine.scheduler.statistics().decoding == 0
        pair.decode.go_on()


async def test_a_deadline_that_passes_while_slots_are_reserved_frees_them() -> None:
    async with pair_of_workers() as pair:
        promise = await pair.reserve(pair.wish(request("r1", PROMPT), deadline=1.0))
        assert pair.decode.leased() == {"transfer_in"}
        pair.decode.clock.ahead = 2.0
        with pytest.raises(LeaseLost):
            await renewed_for_ever(pair, renewal(promise))
        assert not pair.decode.leased()
