"""Workers die, refuse, repeat and forget; the client sees each token once, in order, or why not.

Every fault says itself that it took effect, so no test passes because nothing went wrong.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.harness.router import (
    PAGE_SIZE,
    QUICK,
    SENTENCE,
    Die,
    FakeDecode,
    FaultStage,
    GiveUp,
    LoseTokens,
    Pause,
    Refuse,
    RepeatTokens,
    RouterCluster,
    cluster,
    frames,
    living,
    no_room,
    no_slots,
)
from tests.waiting import until

from ferryman.errors import Cancelled, Unavailable
from ferryman.schedule.request import FinishReason
from ferryman.wire.grpc.status import failure_of
from ferryman.wire.values import Ending, StreamFinished, Usage
from ferryman_router.intake import body_intake as intake
from ferryman_router.request import attempt

LONG = SENTENCE * 2


def _chosen(made: RouterCluster) -> tuple[int, int]:
    """The pair that the policy takes first: ids decide between equals."""
    prefill = min(range(len(made.prefills)), key=lambda i: made.prefills[i].worker_id)
    decode = min(range(len(made.decodes)), key=lambda i: made.decodes[i].worker_id)
    return prefill, decode


async def test_a_decode_worker_that_dies_in_mid_stream_is_replaced(
    two_pairs: RouterCluster,
) -> None:
    _, decode = _chosen(two_pairs)
    victim, headers = two_pairs.decodes[decode], {"x-request-id": "moved-1"}
    gate = victim.suffers(Pause(FaultStage.NEXT_TOKEN))
    body = {"prompt": LONG, "max_tokens": 12, "stream": True, "seed": 3}
    post = two_pairs.http.post("/v1/completions", json=body, headers=headers)
    reading = asyncio.ensure_future(post)
    await _until_told(two_pairs, 1)
    assert gate.happened == 1
    victim.die()
    *said, done = frames((await reading).text)
    gate.release()
    assert done == "[DONE]"
    text = "".join(frame["choices"][0]["text"] for frame in said)
    assert text == two_pairs.expected(12)
    orders = [order for prefill in two_pairs.prefills for order in prefill.orders]
    first, second = sorted(orders, key=lambda order: order.context.attempt)
    assert (first.request.num_generated, second.request.num_generated) == (0, 1)
    prompt = first.request.token_ids.tolist()
    assert second.request.token_ids.tolist() == [*prompt, two_pairs.script[0]]
    assert second.request.sampling.seed == 3
    life = await two_pairs.life_of("moved-1")
    assert life == ["received", "routed", "migrated", "routed", "finished"]


async def _until_told(made: RouterCluster, num_chunks: int) -> None:
    """Until readers of the requests under way have been told so much."""
    requests = made.router.components.frontend.requests
    await until(lambda: sum(len(one.output_log.chunks) for one in requests) == num_chunks)


async def test_a_prefill_worker_that_dies_before_the_commit_is_replaced(
    two_pairs: RouterCluster,
) -> None:
    prefill, _ = _chosen(two_pairs)
    death = two_pairs.prefills[prefill].suffers(Die(FaultStage.COMMIT))
    response = await two_pairs.complete(LONG, max_tokens=8)
    assert death.happened == 1
    assert response.json()["choices"][0]["text"] == two_pairs.expected(8)
    assert response.json()["usage"]["completion_tokens"] == 8


async def test_a_decode_worker_that_dies_at_the_commit_is_replaced(
    two_pairs: RouterCluster,
) -> None:
    _, decode = _chosen(two_pairs)
    death = two_pairs.decodes[decode].suffers(Die(FaultStage.COMMIT))
    response = await two_pairs.complete(LONG, max_tokens=8)
    assert death.happened == 1
    assert response.json()["choices"][0]["text"] == two_pairs.expected(8)


async def test_a_request_that_ran_at_two_deaths_at_one_place_is_suspect(
    nats_url: str, folder: Path
) -> None:
    async with cluster(nats_url, folder, num_decodes=4) as made:
        death = Die(FaultStage.TOKEN, offset=4)
        for decode in made.decodes:
            decode.suffers(death)
        headers = {"x-request-id": "suspect-1"}
        body = {"prompt": LONG, "max_tokens": 12, "stream": True}
        response = await made.http.post("/v1/completions", json=body, headers=headers)
        # The first may take tokens along that had not arrived: its death is then at another place.
        assert death.happened in (2, 3), "the fourth lives"
        life, whole = await made.life_of("suspect-1"), made.expected(4)
    *said, broken = frames(response.text)
    error = broken["error"]
    assert (error["reason"], error["offset"], error["retryable"]) == ("Suspect", 4, False)
    assert error["stage"] in ("migrating", "committed", "decoding")
    assert "".join(frame["choices"][0]["text"] for frame in said) == whole
    assert life[-1] == "failed"


@pytest.mark.parametrize("places", [(4,), (2, 6)], ids=["once", "behind new tokens"])
async def test_a_request_that_deaths_hit_by_chance_ends_whole(
    nats_url: str, folder: Path, places: tuple[int, ...]
) -> None:
    size = len(places) + 1
    async with cluster(nats_url, folder, num_decodes=size) as made:
        workers = sorted(made.decodes, key=lambda one: one.worker_id)  # the policy's order
        deaths = [Die(FaultStage.TOKEN, offset=place) for place in places]
        for decode, death in zip(workers, deaths, strict=False):
            decode.suffers(death)
        response = await made.complete(LONG, max_tokens=12)
        assert [death.happened for death in deaths] == [1] * len(places)
        assert response.json()["choices"][0]["text"] == made.expected(12)


UNASKED = {
    "as finished": StreamFinished(FinishReason.CANCELLED, Usage(0)),
    "as failed": failure_of(Cancelled("prefill_failed")),
}


@pytest.mark.parametrize("offset", [0, 1, 7])
@pytest.mark.parametrize("ending", UNASKED.values(), ids=UNASKED)
async def test_a_request_that_decode_cancels_unasked_goes_on_elsewhere(
    two_pairs: RouterCluster, ending: Ending, offset: int
) -> None:
    _, decode = _chosen(two_pairs)
    given_up = two_pairs.decodes[decode].suffers(GiveUp(ending, offset=offset, times=1))
    headers = {"x-request-id": f"unasked-{offset}"}
    body = {"prompt": LONG, "max_tokens": 12, "stream": True}
    response = await two_pairs.http.post("/v1/completions", json=body, headers=headers)
    assert given_up.happened == 1
    *said, done = frames(response.text)
    assert done == "[DONE]"
    assert "".join(frame["choices"][0]["text"] for frame in said) == two_pairs.expected(12)
    assert [frame["choices"][0]["finish_reason"] for frame in said][-1] == "length"
    orders = [order for prefill in two_pairs.prefills for order in prefill.orders]
    assert sorted(order.request.num_generated for order in orders) == [0, offset]


async def test_a_request_that_every_decode_worker_cancels_ends_with_a_typed_error(
    two_pairs: RouterCluster,
) -> None:
    given_up = GiveUp(StreamFinished(FinishReason.CANCELLED, Usage(0)), offset=4)
    for decode in two_pairs.decodes:
        decode.suffers(given_up)
    body = {"prompt": LONG, "max_tokens": 12, "stream": True}
    response = await two_pairs.http.post("/v1/completions", json=body)
    assert given_up.happened == 3
    *said, broken = frames(response.text)
    assert (broken["error"]["reason"], broken["error"]["offset"]) == ("RetriesExhausted", 4)
    assert "".join(frame["choices"][0]["text"] for frame in said) == two_pairs.expected(4)


async def test_a_full_decode_worker_sends_the_request_elsewhere(two_pairs: RouterCluster) -> None:
    _, decode = _chosen(two_pairs)
    refusal = two_pairs.decodes[decode].suffers(no_slots())
    response = await two_pairs.complete(LONG, max_tokens=4)
    assert refusal.happened == 1
    assert response.json()["choices"][0]["text"] == two_pairs.expected(4)
    assert two_pairs.decodes[1 - decode].over


async def test_a_full_prefill_worker_is_avoided_and_nobody_else(two_pairs: RouterCluster) -> None:
    chosen, _ = _chosen(two_pairs)
    refusal = two_pairs.prefills[chosen].suffers(no_room())
    assert (await two_pairs.complete(LONG, max_tokens=4)).status_code == 200
    assert refusal.happened == 1
    assert two_pairs.prefills[1 - chosen].orders, "the other one took it"
    avoided = {one.beat.worker_id for one in two_pairs.fleet if one.avoid_until}
    assert avoided == {two_pairs.prefills[chosen].worker_id}


async def test_with_nobody_else_a_refused_request_waits_and_tries_again(
    one_pair: RouterCluster,
) -> None:
    by_decode = one_pair.decodes[0].suffers(no_slots(times=5))
    by_prefill = one_pair.prefills[0].suffers(no_room(times=2))
    response = await one_pair.complete(LONG, max_tokens=4)
    assert (by_decode.happened, by_prefill.happened) == (5, 2)
    assert response.json()["choices"][0]["text"] == one_pair.expected(4)


async def test_tokens_that_come_twice_are_shown_once(one_pair: RouterCluster) -> None:
    repeated = one_pair.decodes[0].suffers(RepeatTokens())
    response = await one_pair.complete(LONG, max_tokens=6)
    assert repeated.happened == 6
    assert response.json()["choices"][0]["text"] == one_pair.expected(6)


async def test_tokens_that_are_lost_on_the_way_are_asked_for(one_pair: RouterCluster) -> None:
    lost = one_pair.decodes[0].suffers(LoseTokens({2, 5}))
    response = await one_pair.complete(LONG, max_tokens=9)
    assert lost.happened == 2
    assert response.json()["choices"][0]["text"] == one_pair.expected(9)
    assert 2 in one_pair.decodes[0].resumed_offsets


async def test_a_last_frame_that_is_lost_is_asked_for(one_pair: RouterCluster) -> None:
    lost = one_pair.decodes[0].suffers(LoseTokens({3}))
    response = await one_pair.complete(LONG, max_tokens=4)
    assert lost.happened == 1
    assert response.json()["choices"][0]["text"] == one_pair.expected(4)
    assert one_pair.decodes[0].resumed_offsets == [3]


async def test_a_stream_that_breaks_is_taken_up_at_its_cursors(one_pair: RouterCluster) -> None:
    broken = Refuse(FaultStage.STREAM, Unavailable("the fake breaks its stream"), offset=3, times=1)
    one_pair.decodes[0].suffers(broken)
    response = await one_pair.complete(LONG, max_tokens=9)
    assert broken.happened == 1
    assert response.json()["choices"][0]["text"] == one_pair.expected(9)
    assert len(one_pair.prefills[0].orders) == 1


async def test_a_client_that_disappears_frees_the_workers(one_pair: RouterCluster) -> None:
    one_pair.decodes[0].suffers(Pause(FaultStage.NEXT_TOKEN))
    body = {"prompt": LONG, "max_tokens": 100, "stream": True}
    headers = {"x-request-id": "gone-1"}
    call = one_pair.http.stream("POST", "/v1/completions", json=body, headers=headers)
    async with call as response:
        async for _ in response.aiter_bytes():
            break
    assert await one_pair.decodes[0].until_aborted("gone-1") == "client_gone"
    assert (await one_pair.life_of("gone-1"))[-1] == "cancelled"
    await one_pair.until_free()
    assert not one_pair.decodes[0].running


async def test_a_client_that_disappears_while_prefill_runs_cancels_it(
    one_pair: RouterCluster,
) -> None:
    gate = one_pair.prefills[0].suffers(Pause(FaultStage.COMMIT))
    headers = {"x-request-id": "gone-2"}
    body = {"prompt": LONG, "max_tokens": 4}
    post = one_pair.http.post("/v1/completions", json=body, headers=headers)
    task = asyncio.ensure_future(post)
    await gate.reached(1)
    task.cancel()
    assert await one_pair.decodes[0].until_aborted("gone-2") == "client_gone"
    await one_pair.until_free()
    assert await asyncio.wait_for(one_pair.prefills[0].ends.get(), 120) == "cancelled"
    gate.release()


async def test_an_answer_that_overtakes_its_hand_off_does_not_cancel_it(
    one_pair: RouterCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "FAREWELL_SECONDS", 60.0)
    prefill = one_pair.prefills[0]
    last_word = prefill.suffers(Pause(FaultStage.COMMITTED))
    response = await one_pair.complete(LONG, max_tokens=2)
    assert response.json()["choices"][0]["text"] == one_pair.expected(2)
    await last_word.reached(1)
    await one_pair.until_free()
    assert prefill.ends.empty(), "the answer is complete, and prefill may still speak"
    last_word.release()
    assert await asyncio.wait_for(prefill.ends.get(), 120) == "handed_off"


async def test_a_prefill_that_fails_when_tokens_have_come_costs_no_second_attempt(
    one_pair: RouterCluster,
) -> None:
    prefill, decode = one_pair.prefills[0], one_pair.decodes[0]
    last_word = prefill.suffers(Pause(FaultStage.COMMITTED))
    unheard = Unavailable("the fake has not heard what became of its commit")
    failure = prefill.suffers(Refuse(FaultStage.HANDED_OFF, unheard))
    gate = decode.suffers(Pause(FaultStage.NEXT_TOKEN))
    body = {"prompt": LONG, "max_tokens": 6, "stream": True}
    async with one_pair.http.stream("POST", "/v1/completions", json=body) as response:
        parts = response.aiter_text()
        text = await anext(parts)
        last_word.release()
        assert await asyncio.wait_for(prefill.ends.get(), 120) == "failed"
        gate.release()
        text += "".join([part async for part in parts])
    assert failure.happened == 1
    assert "".join(f["choices"][0]["text"] for f in frames(text)[:-1]) == one_pair.expected(6)
    assert len(prefill.orders) == 1
    assert not decode.aborted


async def test_a_stop_that_overtakes_the_hand_off_knows_what_was_cached(
    one_pair: RouterCluster,
) -> None:
    prefill = one_pair.prefills[0]
    gate, last_word = (
        prefill.suffers(Pause(FaultStage.COMMIT)),
        prefill.suffers(Pause(FaultStage.COMMITTED)),
    )
    headers, body = {"x-request-id": "stop-1"}, {"prompt": LONG, "max_tokens": 9, "stop": "ferry"}
    post = one_pair.http.post("/v1/completions", json=body, headers=headers)
    asking = asyncio.ensure_future(post)
    async with asyncio.timeout(120):
        requests = one_pair.router.components.frontend.requests
        while (found := requests.find("stop-1")) is None or found.history.state != "prefilling":
            await asyncio.wait({asking}, timeout=0.005)
    gate.release()
    usage = (await asking).json()["usage"]
    assert last_word.happened == 1
    assert usage["prompt_tokens_details"]["cached_tokens"] == PAGE_SIZE
    assert sum(usage["ferryman"]["uncached_reasons"].values()) > 0
    last_word.release()


async def test_a_prefill_worker_that_never_speaks_again_is_cancelled_in_the_end(
    one_pair: RouterCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "FAREWELL_SECONDS", 0.05)
    prefill = one_pair.prefills[0]
    last_word = prefill.suffers(Pause(FaultStage.COMMITTED))
    assert (await one_pair.complete(LONG, max_tokens=2)).status_code == 200
    assert await asyncio.wait_for(prefill.ends.get(), 120) == "cancelled"
    assert last_word.happened == 1


async def test_a_deadline_in_mid_stream_is_a_typed_end(one_pair: RouterCluster) -> None:
    """A deadline that passes before the first token is another case: then it gets more time."""
    decode = one_pair.decodes[0]
    gate = decode.suffers(Pause(FaultStage.NEXT_TOKEN))
    body = {"prompt": LONG, "max_tokens": 100, "stream": True}
    for deadline_ms in ("300", "1500", "6000", "18000"):
        name = f"late-{deadline_ms}"
        headers = {"x-request-id": name, "x-ferryman-deadline-ms": deadline_ms}
        response = await one_pair.http.post("/v1/completions", json=body, headers=headers)
        if response.status_code == 200:
            break
    assert gate.happened > 0
    error = frames(response.text)[-1]["error"]
    assert (error["reason"], error["type"]) == ("DeadlineExceeded", "timeout_error")
    assert error["offset"] == 1
    assert await decode.until_aborted(name) == "deadline"
    assert (await one_pair.life_of(name))[-1] == "cancelled"


async def test_what_is_under_way_is_counted_when_a_prompt_has_been_tokenized(
    nats_url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        intake, "QUICK_BYTES", -1
    )  # in a thread: both come in before either is done
    limits = QUICK.model_copy(update={"max_in_flight": 1})
    async with cluster(nats_url, folder, limits=limits) as made:
        gate = made.decodes[0].suffers(Pause(FaultStage.NEXT_TOKEN))
        both = {asyncio.ensure_future(made.complete(LONG, max_tokens=3)) for _ in range(2)}
        done, waiting = await asyncio.wait(both, timeout=120, return_when=asyncio.FIRST_COMPLETED)
        assert [one.result().status_code for one in done] == [429]
        gate.release()
        assert [(await one).status_code for one in waiting] == [200]


async def test_draining_refuses_the_new_and_finishes_the_old(one_pair: RouterCluster) -> None:
    gate = one_pair.decodes[0].suffers(Pause(FaultStage.NEXT_TOKEN))
    body = {"prompt": LONG, "max_tokens": 5, "stream": True}
    async with one_pair.http.stream("POST", "/v1/completions", json=body) as response:
        parts = response.aiter_text()
        text = await anext(parts)
        draining = asyncio.ensure_future(one_pair.router.drain())
        await asyncio.wait({draining}, timeout=0.05)
        assert (await one_pair.http.get("/ready")).status_code == 503
        assert (await one_pair.complete(max_tokens=2)).status_code == 503
        gate.release()
        text += "".join([part async for part in parts])
    await draining
    said = "".join(f["choices"][0]["text"] for f in frames(text)[:-1])
    assert said == one_pair.expected(5)


async def test_a_worker_that_joins_late_serves_who_waited(nats_url: str, folder: Path) -> None:
    limits = QUICK.model_copy(update={"no_worker_seconds": 10.0})
    async with cluster(nats_url, folder, num_decodes=0, limits=limits) as made:
        waiting = asyncio.ensure_future(made.complete(LONG, max_tokens=4))
        await made.until_queued(1)
        late = FakeDecode(made.script)
        async with living(late, made.bus, made.subjects):
            assert (await waiting).json()["choices"][0]["text"] == made.expected(4)


async def test_many_at_once_each_get_their_own(two_pairs: RouterCluster) -> None:
    answers = await asyncio.gather(
        *(two_pairs.complete("the " * (i + 1), max_tokens=i + 1) for i in range(40))
    )
    texts = [answer.json()["choices"][0]["text"] for answer in answers]
    assert texts == [two_pairs.expected(i + 1) for i in range(40)]
