"""A request that decodes where it was prefilled: one owner of its slots, one history, one end."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random

import pytest
from tests.both.violations import violations
from tests.harness.pair import WorkerPair, expected, one_worker, request
from tests.waiting import until

from ferryman.cache.manifest import Kind
from ferryman.errors import InvalidRequest, OutOfSlots, Stale, WrongEpoch
from ferryman.schedule.batch import DecodeStep, PrefillStep, StepPlan
from ferryman.wire.codec.prefill import prefill_order_to_wire
from ferryman.wire.grpc.rpc import ending
from ferryman.wire.values import RouterAbort, StreamFinished, WorkerAddress

LONG = list(range(1, 30))
ASKED = request("r1", LONG, max_tokens=9)


def names_in(pair: WorkerPair) -> list[str]:
    """The lifecycle events of the worker, in order."""
    return [f"{event.role}.{event.name}" for event in pair.decode.events()]


async def test_it_decodes_on_the_very_slots_of_its_prompt() -> None:
    steps: list[StepPlan] = []
    async with one_worker(steps=steps) as pair:
        told = await pair.run_prefill(pair.order(ASKED))
        tokens, last = await pair.read_tokens("r1")
        assert tokens == expected(ASKED)
        assert isinstance(last.ending, StreamFinished)
        assert last.ending.usage.prompt_tokens == len(LONG)
        assert told[-1].handed_off.num_bytes == 0
        (facts,) = pair.decode.facts("handed_off")
        assert (facts["path"], facts["bytes"]) == ("local", 0)
        assert not violations(pair, "r1")
    prompts = [step for step in steps if isinstance(step, PrefillStep)]
    first = next(step for step in steps if isinstance(step, DecodeStep))
    for kind in (Kind.FULL, Kind.WINDOW):
        there = first.page_tables[kind][0]
        kept = there >= 0
        kept[-1] = False  # the page of the new token may be one more
        written = prompts[-1].page_tables[kind][0]
        assert kept.any()
        assert (there[: len(written)][kept[: len(written)]] == written[kept[: len(written)]]).all()
    assert first.read_slots[0] == prompts[-1].chunks[0].working_slot
    assert not first.ops.copies, "nothing is copied for a change of phase"


async def test_its_history_is_that_of_any_hand_off() -> None:
    async with one_worker() as pair:
        await pair.run_prefill(pair.order(ASKED))
        await pair.read_tokens("r1")
        said = names_in(pair)
        for name in ("prefill.queued", "decode.reserved", "prefill.admitted", "decode.verified"):
            assert said.count(name) == 1
        in_order = ["prefill.queued", "decode.reserved", "decode.verified", "decode.first_token"]
        places = [said.index(name) for name in [*in_order, "decode.finished"]]
        assert places == sorted(places)
        assert said.count("prefill.handed_off") == 1


async def test_a_request_of_one_token_tells_what_it_reused() -> None:
    async with one_worker() as pair:
        await pair.run_prefill(pair.order(ASKED))
        await pair.read_tokens("r1")
        await pair.run_prefill(pair.order(request("r2", [*LONG, 3], max_tokens=1)))
        _, last = await pair.read_tokens("r2")
        assert isinstance(last.ending, StreamFinished)
        assert last.ending.usage.cached.device == 28
        assert not violations(pair, "r1", "r2")


async def test_a_running_request_goes_on_while_a_long_prompt_is_computed() -> None:
    steps: list[StepPlan] = []
    async with one_worker(steps=steps) as pair:
        pair.decode.hold()
        first, long = request("a", [5, 6], 20), request("b", list(range(40, 80)), 4)
        async with asyncio.TaskGroup() as calls:
            calls.create_task(pair.run_prefill(pair.order(first)))
            await until(
                lambda: pair.decode.engine.scheduler.statistics().prefilling > 0 or bool(steps)
            )
            calls.create_task(pair.run_prefill(pair.order(long)))
            await until(lambda: pair.decode.engine.scheduler.statistics().waiting > 0)
            pair.decode.go_on()
        assert (await pair.read_tokens("a"))[0] == expected(first)
        assert (await pair.read_tokens("b"))[0] == expected(long)
    kinds = "".join("p" if isinstance(step, PrefillStep) else "d" for step in steps)
    inner = kinds[: kinds.rindex("p")].lstrip("p")
    assert inner
    assert "pp" not in inner, "a decode step between any two chunks"


async def test_random_requests_in_scarce_pools_are_answered_exactly() -> None:
    rng = Random(5)
    asked = [
        request(f"r{i}", [rng.randrange(1, 9)] * rng.randrange(1, 24), rng.randrange(8, 30))
        for i in range(24)
    ]
    async with one_worker(num_slots=18) as pair:
        for first in range(0, len(asked), 8):
            async with asyncio.TaskGroup() as calls:
                for one in asked[first : first + 8]:
                    calls.create_task(pair.run_prefill(pair.order(one)))
            for one in asked[first : first + 8]:
                assert (await pair.read_tokens(one.request_id))[0] == expected(one)
        assert pair.decode.facts("retracted"), "the pools were meant to run out"
        assert pair.decode.facts("resumed")
        assert not violations(pair, *[one.request_id for one in asked])


# Ends before and after the first token.


async def held_before_its_first_token(pair: WorkerPair) -> asyncio.Task[object]:
    pair.decode.hold()
    call = asyncio.create_task(pair.run_prefill(pair.order(ASKED)))
    await until(lambda: pair.decode.engine.scheduler.statistics().prefilling == 1)
    return call


async def test_a_call_that_its_router_leaves_frees_the_prompt() -> None:
    async with one_worker() as pair:
        pair.decode.hold()
        with ending(pair.prefill_stub.Prefill(prefill_order_to_wire(pair.order(ASKED)))) as call:
            await anext(aiter(call))
            await until(lambda: pair.decode.engine.scheduler.statistics().prefilling == 1)
        await until(lambda: bool(pair.decode.facts("aborted")))
        pair.decode.go_on()
        await until(lambda: not pair.decode.leased())
        assert [facts["reason"] for facts in pair.decode.facts("aborted")] == ["cancelled"]
        assert not violations(pair)


async def test_a_request_outlives_the_call_that_has_handed_it_over() -> None:
    async with one_worker() as pair:
        await pair.run_prefill(pair.order(ASKED))
        assert (await pair.read_tokens("r1"))[0] == expected(ASKED)


async def test_an_abort_ends_it_at_any_time_and_refuses_what_comes_late() -> None:
    async with one_worker() as pair:
        call = await held_before_its_first_token(pair)
        answer = await pair.abort(RouterAbort("r1", 1, "client_gone", "router-1"))
        assert answer.was_known
        assert not answer.has_pending_writes
        pair.decode.go_on()
        with pytest.raises(Exception, match="given up"):
            await call
        assert not violations(pair)
        with pytest.raises(Stale):
            await pair.run_prefill(pair.order(ASKED))
        await pair.run_prefill(pair.order(ASKED, attempt=2))
        assert (await pair.read_tokens("r1", 2))[0] == expected(ASKED)


async def test_a_later_attempt_ends_the_earlier_one() -> None:
    async with one_worker() as pair:
        call = await held_before_its_first_token(pair)
        again = asyncio.create_task(pair.run_prefill(pair.order(ASKED, attempt=2)))
        await until(lambda: bool(pair.decode.facts("aborted")))
        pair.decode.go_on()
        with pytest.raises(Exception, match="given up"):
            await call
        await again
        assert (await pair.read_tokens("r1", 2))[0] == expected(ASKED)
        assert [facts["reason"] for facts in pair.decode.facts("aborted")] == ["superseded"]


async def test_the_same_attempt_twice_is_refused() -> None:
    async with one_worker() as pair:
        await pair.run_prefill(pair.order(ASKED))
        with pytest.raises(Stale):
            await pair.run_prefill(pair.order(ASKED))
        other = replace(pair.order(ASKED, attempt=2), router_id="router-2")
        with pytest.raises(Stale, match="another router"):
            await pair.run_prefill(other)
        await pair.read_tokens("r1")


async def test_a_deadline_ends_it_in_any_phase() -> None:
    async with one_worker() as pair:
        pair.decode.hold()
        call = asyncio.create_task(pair.run_prefill(pair.order(ASKED, deadline=60.0)))
        await until(lambda: pair.decode.engine.scheduler.statistics().prefilling == 1)
        pair.decode.clock.ahead += 61
        await until(lambda: bool(pair.decode.facts("aborted")))
        pair.decode.go_on()
        with pytest.raises(Exception, match="given up"):
            await call
        assert [facts["reason"] for facts in pair.decode.facts("aborted")] == ["deadline"]
        assert not violations(pair)


async def test_an_error_in_the_work_for_one_prompt_ends_that_request_alone() -> None:
    async with one_worker() as pair:
        pair.decode.hold()
        bad, good = request("bad", LONG, 4), request("good", [*LONG, 2], 4)
        calls = [asyncio.create_task(pair.run_prefill(pair.order(one))) for one in (bad, good)]
        await until(lambda: "bad.1" in pair.decode.engine.scheduler.sequences)
        pair.decode.engine.scheduler.fail("bad.1", OutOfSlots("planted"))
        pair.decode.parts.wake.set()
        pair.decode.go_on()
        with pytest.raises(OutOfSlots, match="planted"):
            await calls[0]
        await calls[1]
        assert (await pair.read_tokens("good"))[0] == expected(good)
        assert [facts["reason"] for facts in pair.decode.facts("aborted")] == ["OutOfSlots"]
        assert not violations(pair, "good")


async def test_a_prompt_for_another_decode_worker_is_refused() -> None:
    async with one_worker() as pair:
        order = pair.order(ASKED)
        elsewhere = WorkerAddress("decode-00000001", "127.0.0.1:1", 7)
        with pytest.raises(InvalidRequest, match="decodes what it prefills"):
            await pair.run_prefill(replace(order, decode=elsewhere))
        with pytest.raises(WrongEpoch):
            await pair.run_prefill(replace(order, worker_epoch=7))
        assert not pair.decode.leased()


async def test_it_drains_when_its_last_request_has_ended() -> None:
    async with one_worker() as pair:
        call = await held_before_its_first_token(pair)
        draining = asyncio.create_task(pair.decode.service.drain())
        await until(lambda: not pair.decode.service.load().is_ready)
        assert not draining.done()
        pair.decode.go_on()
        await call
        await draining
        assert len(pair.decode.facts("finished")) == 1


async def test_each_request_counts_once_in_its_load() -> None:
    async with one_worker() as pair:
        call = await held_before_its_first_token(pair)
        load = pair.decode.service.load()
        assert (load.num_running, load.num_queued, load.planes) == (1, 0, ("local",))
        pair.decode.go_on()
        await call
        await pair.read_tokens("r1")
        await until(lambda: pair.decode.service.load().num_running == 0)
