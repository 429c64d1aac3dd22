"""A router may end an attempt and all earlier ones; a writer may end its own open reservation.

Row 50 of the catalogue, from decode's side. Every abort is tried late, twice, and forged.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.harness.pair import WorkerPair, expected, pair_of_workers, request

from ferryman.errors import InvalidRequest, LeaseLost, Stale, WrongEpoch
from ferryman.handoff.effects import ReceiverLimits, WriteFence
from ferryman.schedule.batch import Sampled
from ferryman.wire.codec.handoff import commit_order_to_wire
from ferryman.wire.grpc.status import typed_errors
from ferryman.wire.v1 import decode_pb2
from ferryman.wire.values import CommitOrder, Failure, RouterAbort, Usage, WriterAbort
from ferryman_decode import handoff_receiver

PROMPT = [3] * 21
ASKED = request("r1", PROMPT, max_tokens=40)
CANCELLED = RouterAbort("r1", 1, "client_gone", "router-1")


def count(pair: WorkerPair) -> tuple[int, int]:
    """How many requests are reserved for, and how many decode."""
    statistics = pair.decode.engine.scheduler.statistics()
    return statistics.reserved, statistics.decoding


def word_on(promise: decode_pb2.ReserveResponse, attempt: int = 1) -> WriterAbort:
    """The writer's word that it gives this reservation up."""
    fence = WriteFence(promise.epoch, promise.reservation_id, attempt)
    return WriterAbort("r1", fence, "prefill_failed")


async def begun(pair: WorkerPair) -> None:
    """A request that decodes and is held there."""
    pair.decode.hold()
    await pair.run_prefill(pair.order(ASKED))
    assert count(pair) == (0, 1)


def late_word(pair: WorkerPair) -> WriterAbort:
    """The late abort that the writer of the decoding request could still send."""
    (name,) = pair.decode.service.receiver.table._closed
    return WriterAbort("r1", WriteFence(pair.decode.parts.epoch, name, 1), "prefill_failed")


async def test_a_writer_cannot_end_what_was_committed() -> None:
    async with pair_of_workers() as pair:
        await begun(pair)
        late = late_word(pair)
        for _ in range(2):
            answer = await pair.abort(late)
            assert answer.is_committed
            assert not answer.was_known
            assert not answer.has_pending_writes
        assert count(pair) == (0, 1)
        pair.decode.go_on()
        tokens, _ = await pair.read_tokens("r1")
        assert tokens == expected(ASKED)
        assert (await pair.abort(late)).is_committed, "also when the request has ended"
        assert not pair.decode.facts("aborted")


async def test_a_writer_ends_its_own_open_reservation_once() -> None:
    async with pair_of_workers() as pair:
        promise = await pair.reserve(pair.wish(ASKED))
        first, second = await pair.abort(word_on(promise)), await pair.abort(word_on(promise))
        assert (first.was_known, second.was_known) == (True, False)
        assert not first.is_committed | second.is_committed
        assert not pair.decode.leased()
        assert [facts["reason"] for facts in pair.decode.facts("aborted")] == ["prefill_failed"]
        await pair.reserve(pair.wish(ASKED, attempt=2))
        await pair.abort(word_on(promise))
        assert count(pair) == (1, 0), "the next attempt is not the writer's of the first"


@pytest.mark.parametrize("forged", ["attempt", "reservation", "request"])
async def test_a_word_on_anything_else_ends_nothing(forged: str) -> None:
    async with pair_of_workers() as pair:
        word = word_on(await pair.reserve(pair.wish(ASKED)))
        others = {
            "attempt": replace(word, fence=replace(word.fence, attempt=2)),
            "reservation": replace(word, fence=replace(word.fence, reservation_id="res-0")),
            "request": replace(word, request_id="r2"),
        }
        answer = await pair.abort(others[forged])
        assert not answer.was_known | answer.is_committed
        assert count(pair) == (1, 0)


async def test_a_word_on_another_life_of_decode_is_refused() -> None:
    async with pair_of_workers() as pair:
        word = word_on(await pair.reserve(pair.wish(ASKED)))
        with pytest.raises(WrongEpoch):
            await pair.abort(replace(word, fence=replace(word.fence, epoch=word.fence.epoch + 1)))
        assert count(pair) == (1, 0)


async def test_an_abort_ends_the_attempt_before_the_one_it_names() -> None:
    async with pair_of_workers() as pair:
        await begun(pair)
        assert (await pair.abort(replace(CANCELLED, attempt=2))).was_known
        pair.decode.go_on()
        assert count(pair) == (0, 0)
        with pytest.raises(Stale):
            await pair.reserve(pair.wish(ASKED, attempt=2))


async def test_an_abort_leaves_the_attempts_behind_it_alone() -> None:
    async with pair_of_workers() as pair:
        await pair.reserve(pair.wish(ASKED, attempt=2))
        assert not (await pair.abort(CANCELLED)).was_known
        assert count(pair) == (1, 0)


async def test_another_routers_abort_ends_nothing() -> None:
    async with pair_of_workers() as pair:
        await begun(pair)
        assert not (await pair.abort(replace(CANCELLED, router_id="router-2"))).was_known
        assert count(pair) == (0, 1)
        await pair.reserve(pair.wish(request("r2", PROMPT)))
        await pair.abort(RouterAbort("r2", 1, "client_gone", "router-2"))
        assert count(pair) == (1, 1)
        pair.decode.go_on()


async def test_an_aborted_request_ends_with_a_failure_not_with_a_finish() -> None:
    async with pair_of_workers() as pair:
        await begun(pair)
        assert (await pair.abort(CANCELLED)).was_known
        pair.decode.go_on()
        _, last = await pair.read_tokens("r1")
        assert isinstance(last.ending, Failure)
        assert last.ending.code == "CANCELLED"


async def test_an_abort_that_says_not_who_asks_is_refused() -> None:
    async with pair_of_workers() as pair:
        await begun(pair)
        with pytest.raises(InvalidRequest), typed_errors():
            await pair.decode_stub.Abort(decode_pb2.AbortRequest(request_id="r1", attempt=1))
        assert count(pair) == (0, 1)
        pair.decode.go_on()


async def test_a_reserve_that_comes_after_all_of_its_attempt_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The table has forgotten the reservation; the tokens are kept, and are not taken away."""
    monkeypatch.setattr(handoff_receiver, "ReceiverLimits", lambda: ReceiverLimits(max_closed=0))
    async with pair_of_workers() as pair:
        await begun(pair)
        with pytest.raises(Stale):
            await pair.reserve(pair.wish(ASKED))
        assert count(pair) == (0, 1)
        pair.decode.go_on()
        tokens, _ = await pair.read_tokens("r1")
        assert tokens == expected(ASKED)


async def test_a_commit_for_another_request_is_refused() -> None:
    async with pair_of_workers() as pair:
        promise = await pair.reserve(pair.wish(ASKED))
        context = replace(pair.wish(ASKED).context, request_id="r2")
        name, epoch = promise.reservation_id, promise.epoch
        commit = CommitOrder(context, name, epoch, (), (), Sampled(1, {}), Usage(len(PROMPT)))
        with pytest.raises(LeaseLost, match="not for r2"), typed_errors():
            await pair.decode_stub.Commit(commit_order_to_wire(commit), timeout=120)
        assert count(pair) == (1, 0)
