"""A request that another router takes over, and requests whose router is gone.

Row 50 of the catalogue: one router alone has a request, and a router that lost it hears so.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.harness.pair import (
    WorkerPair,
    expected,
    pair_of_workers,
    read_to_the_end,
    request,
    stream_of,
)
from tests.waiting import until

from ferryman.errors import Stale
from ferryman.wire.values import (
    Failure,
    PrefillOrder,
    RouterAbort,
)
from ferryman_decode.token_streams import ORPHAN_SECONDS, OrphanWatch

ASKED = request("r1", [3] * 21, max_tokens=40)


def taken_over(pair: WorkerPair, attempt: int, *, taken_from: str = "router-1") -> PrefillOrder:
    """The order of another router, which goes on with the request of the first."""
    order = pair.order(ASKED, attempt, deadline=1000.0)
    context = replace(order.context, taken_from=taken_from)
    return replace(order, context=context, router_id="router-2")


async def test_the_router_that_takes_over_goes_on_and_the_other_hears_of_it() -> None:
    async with (
        pair_of_workers() as pair,
        stream_of(pair, "router-1") as first,
        stream_of(pair, "router-2") as second,
    ):
        pair.decode.hold()
        await pair.run_prefill(pair.order(ASKED))
        await pair.run_prefill(taken_over(pair, 2))
        _, last = await read_to_the_end(first)
        assert last.frame.attempt == 1
        assert isinstance(last.ending, Failure)
        assert (last.ending.code, last.ending.reason) == ("ABORTED", "TakenOver")
        assert [facts["reason"] for facts in pair.decode.facts("aborted")] == ["taken_over"]
        pair.decode.go_on()
        tokens, last = await read_to_the_end(second)
        assert (tokens, last.frame.attempt) == (expected(ASKED), 2)
        await until(lambda: not pair.decode.leased())


async def test_a_router_that_lost_a_request_cannot_have_it_back() -> None:
    async with pair_of_workers() as pair:
        pair.decode.hold()
        await pair.run_prefill(pair.order(ASKED))
        await pair.run_prefill(taken_over(pair, 2))
        with pytest.raises(Stale, match="another router"):
            await pair.run_prefill(pair.order(ASKED, 3))
        late = await pair.abort(RouterAbort("r1", 9, "client_gone", "router-1"))
        assert not late.was_known, "nor end it"
        assert pair.decode.engine.scheduler.statistics().decoding == 1


@pytest.mark.parametrize(
    ("attempt", "taken_from"), [(1, "router-1"), (2, "")], ids=["same attempt", "not taken over"]
)
async def test_another_router_begins_nothing_by(attempt: int, taken_from: str) -> None:
    async with pair_of_workers() as pair:
        pair.decode.hold()
        await pair.run_prefill(pair.order(ASKED))
        with pytest.raises(Stale, match="another router"):
            await pair.run_prefill(taken_over(pair, attempt, taken_from=taken_from))
        assert pair.decode.engine.scheduler.statistics().decoding == 1
        assert not pair.decode.facts("aborted")


async def test_a_router_that_takes_over_ends_the_attempts_of_the_one_before_it() -> None:
    """At the worker that decoded for it, if it goes on with another one."""
    async with pair_of_workers() as pair:
        pair.decode.hold()
        await pair.run_prefill(pair.order(ASKED))
        answer = await pair.abort(RouterAbort("r1", 1, "taken_over", "router-1"))
        assert answer.was_known
        _, last = await pair.read_tokens("r1")
        assert isinstance(last.ending, Failure)
        assert last.ending.reason == "TakenOver"
        pair.decode.go_on()
        await until(lambda: not pair.decode.leased())


async def test_the_requests_of_a_router_that_is_gone_end_after_a_while() -> None:
    async with pair_of_workers() as pair:
        pair.decode.hold()
        async with stream_of(pair, "router-1"):
            await pair.run_prefill(pair.order(ASKED, deadline=1000.0))
            pair.decode.clock.ahead = 10 * ORPHAN_SECONDS
            later = request("r2", [4] * 21, max_tokens=40)
            await pair.run_prefill(pair.order(later, deadline=1000.0))
            assert not pair.decode.facts("aborted"), "its router reads"
        await until(lambda: bool(pair.decode.service.requests._orphan_watch._silent_since))
        pair.decode.clock.ahead = 11 * ORPHAN_SECONDS
        await until(lambda: len(pair.decode.facts("aborted")) == 2)
        assert {facts["reason"] for facts in pair.decode.facts("aborted")} == {"orphaned"}
        pair.decode.go_on()
        await until(lambda: not pair.decode.leased())


def test_a_router_that_comes_back_is_not_gone() -> None:
    open_streams: set[str] = set()
    watch = OrphanWatch(open_streams.__contains__)
    assert not watch.gone({"a", "b"}, 0.0)
    open_streams.add("a")
    assert watch.gone({"a", "b"}, ORPHAN_SECONDS) == {"b"}
    open_streams.clear()
    assert not watch.gone({"a"}, ORPHAN_SECONDS), "counted from when it was missed"
    assert watch.gone({"a"}, 2 * ORPHAN_SECONDS) == {"a"}
