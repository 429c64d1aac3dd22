"""The SDK against a real gRPC server: its requests, its results, and its handling of failures."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest
from tests.client.fake_router import (
    CARD,
    QUICK,
    ROUTE,
    USAGE,
    FakeRouter,
    Wire,
    serving,
    text_of,
    token_id,
    wired,
)

from ferryman.client import (
    ChatTurn,
    Client,
    ConnectionBroken,
    FinishReason,
    GenerateEvent,
    GenerateFinished,
    GenerateStarted,
    NotResumable,
    SamplingParams,
    TokenChunk,
)
from ferryman.errors import (
    Cancelled,
    CorruptState,
    DeadlineExceeded,
    FerrymanError,
    InvalidRequest,
    NotFound,
    QueueFull,
    RequestIdInUse,
    Stopping,
)

FOUR = SamplingParams(max_tokens=4, seed=3)


async def collected(client: Client, request_id: str = "") -> list[GenerateEvent]:
    return [event async for event in client.generate("hello", FOUR, request_id=request_id)]


def assert_whole(events: list[GenerateEvent], num_tokens: int = 5) -> None:
    """Asserts: started, then every token once and in order, then the end."""
    assert isinstance(events[0], GenerateStarted)
    chunks = [event for event in events if isinstance(event, TokenChunk)]
    token_ids = [token for chunk in chunks for token in chunk.token_ids]
    assert token_ids == [token_id(i) for i in range(num_tokens)]
    assert [chunk.offset for chunk in chunks] == list(range(num_tokens))
    assert "".join(chunk.text for chunk in chunks) == "".join(map(text_of, range(num_tokens)))
    assert events[-1] == GenerateFinished(FinishReason.LENGTH, USAGE, ".")
    assert len(events) == len(chunks) + 2


def cut_once_before(router: FakeRouter, wire: Wire, offset: int) -> None:
    async def before(at: int) -> None:
        if at == offset and not wire.num_cuts:
            wire.cut()
            await asyncio.Event().wait()

    router.before = before


def fail_with(router: FakeRouter, offset: int, *errors: FerrymanError) -> None:
    waiting = list(errors)

    async def before(at: int) -> None:
        if at == offset and waiting:
            raise waiting.pop(0)

    router.before = before


async def test_an_answer_comes_as_typed_events() -> None:
    router = FakeRouter()
    async with wired(router) as (client, _):
        assert_whole(await collected(client, "mine"))
    (request,) = router.requests
    assert request.request_id == "mine"
    assert request.prompt.text == "hello"
    assert request.sampling.max_tokens == 4
    assert request.sampling.seed == 3


@pytest.mark.parametrize("offset", [0, 1, 3, 5])
async def test_a_broken_connection_is_taken_up_behind_the_last_token(offset: int) -> None:
    router = FakeRouter()
    async with wired(router) as (client, wire):
        cut_once_before(router, wire, offset)
        assert_whole(await collected(client))
        assert wire.num_cuts == 1
    assert len(router.requests) == 2
    # The message sent last may have been lost with the connection.
    assert router.offsets[0] == 0
    assert router.offsets[1] <= offset
    assert router.sent == [(router.ids[0], 0), (router.ids[0], 1)]


async def test_every_break_with_progress_in_between_is_borne() -> None:
    router = FakeRouter(num_tokens=8)
    async with wired(router) as (client, wire):

        async def before(at: int) -> None:
            if wire.num_cuts < at and router.requests[-1].resume_from_offset < at:
                wire.cut()
                await asyncio.Event().wait()

        router.before = before
        assert_whole(await collected(client), num_tokens=8)
        assert wire.num_cuts > QUICK.max_failures


async def test_a_connection_that_always_breaks_is_given_up() -> None:
    router = FakeRouter()
    async with wired(router, replace(QUICK, outage_seconds=0.05)) as (client, wire):

        async def before(_: int) -> None:
            wire.cut()
            await asyncio.Event().wait()

        router.before = before
        with pytest.raises(ConnectionBroken):
            await collected(client)
    assert len(router.requests) > 1


async def test_a_router_that_does_not_come_back_ends_an_answer_with_what_was_delivered() -> None:
    router, got, has_some = FakeRouter(), list[int](), asyncio.Event()

    async def read(client: Client) -> None:
        async for event in client.generate("hello", FOUR):
            if isinstance(event, TokenChunk):
                got.extend(event.token_ids)
                has_some.set()

    async with wired(router, replace(QUICK, outage_seconds=0.05)) as (client, wire):

        async def before(at: int) -> None:
            if at == 2:
                await has_some.wait()
            if at == 2 or len(router.requests) > 1:
                wire.cut()
                await asyncio.Event().wait()

        router.before = before
        with pytest.raises(NotResumable) as caught:
            await read(client)
    assert caught.value.num_tokens == len(got) > 0
    assert f"{len(got)} tokens were delivered" in str(caught.value)


@pytest.mark.parametrize("offset", [0, 3])
async def test_an_answer_goes_on_at_the_router_that_comes_after_one_that_ends(offset: int) -> None:
    router = FakeRouter()
    fail_with(router, offset, *[Stopping("this router is ending")] * (QUICK.max_failures + 2))
    async with wired(router) as (client, _):
        assert_whole(await collected(client))
    num_sent = QUICK.max_failures + 3
    assert router.sent == [(router.ids[0], n) for n in range(num_sent)], "one call, one name"
    assert set(router.offsets) == {0}, "no other router could resume it"
    first, *later = router.requests
    assert first.sampling.seed == FOUR.seed
    assert {request.sampling.seed for request in later} == {7}, "what the first router drew by"


async def test_a_router_that_forgot_the_request_gets_it_anew() -> None:
    router = FakeRouter()
    async with wired(router) as (client, wire):

        async def before(at: int) -> None:
            if at == 2 and not wire.num_cuts:
                wire.cut()
                await asyncio.Event().wait()
            if len(router.requests) == 2 and router.requests[-1].resume_from_offset:
                raise NotFound("forgotten")

        router.before = before
        assert_whole(await collected(client))
        assert wire.num_cuts == 1
    assert router.offsets[0] == 0
    assert router.offsets[-1] == 0


async def test_an_answer_that_differs_when_begun_anew_is_refused() -> None:
    router = FakeRouter()

    async def before(at: int) -> None:
        if at == 2 and len(router.requests) == 1:
            router.token = lambda position: token_id(position) + 1
            raise NotFound("forgotten")

    router.before = before
    async with wired(router) as (client, _):
        with pytest.raises(NotResumable) as caught:
            await collected(client)
        assert caught.value.num_tokens == 2
    assert router.offsets == [0, 0]


async def test_a_full_queue_is_asked_again_under_a_new_id() -> None:
    router = FakeRouter()
    fail_with(router, 0, QueueFull("full", 0.001), QueueFull("full", 0.001))
    async with wired(router) as (client, _):
        events = await collected(client)
        assert_whole(events)
    assert len(set(router.ids)) == 3
    assert {num_before for _, num_before in router.sent} == {0}, "nobody has had these ids"
    assert isinstance(events[0], GenerateStarted)
    assert events[0].request_id == router.ids[-1]


async def test_an_id_that_was_given_is_kept() -> None:
    router = FakeRouter()
    fail_with(router, 0, QueueFull("full", 0.001))
    async with wired(router) as (client, _):
        assert_whole(await collected(client, "mine"))
    assert router.sent == [("mine", 0), ("mine", 1)]


async def test_an_id_that_another_router_has_is_sent_once_more_as_sent_before() -> None:
    """Then the router gives the request an id of its own."""
    router = FakeRouter()
    fail_with(router, 0, RequestIdInUse("of another"))
    async with wired(router) as (client, _):
        assert_whole(await collected(client, "mine"))
        fail_with(router, 0, *[RequestIdInUse("of another")] * 3)
        with pytest.raises(RequestIdInUse):
            await collected(client, "yours")
    assert router.sent == [("mine", 0), ("mine", 1), ("yours", 0), ("yours", 1)]


async def test_room_that_comes_after_the_deadline_is_not_waited_for() -> None:
    router = FakeRouter()
    fail_with(router, 0, QueueFull("full", 3600.0))
    async with wired(router) as (client, _):
        with pytest.raises(QueueFull) as caught:
            await collected(client)
    assert caught.value.retry_after_seconds == 3600.0


async def test_a_failure_behind_the_first_token_is_the_last_word() -> None:
    router = FakeRouter()
    fail_with(router, 2, CorruptState("bad page"))
    async with wired(router) as (client, _):
        with pytest.raises(CorruptState, match="bad page"):
            await collected(client)
    assert len(router.requests) == 1


async def test_what_cannot_succeed_is_not_tried_again() -> None:
    router = FakeRouter()
    fail_with(router, 0, InvalidRequest("no such thing", "top_p"))
    async with wired(router) as (client, _):
        with pytest.raises(InvalidRequest) as caught:
            await collected(client)
    assert caught.value.param == "top_p"
    assert len(router.requests) == 1


async def test_a_deadline_ends_a_silent_stream() -> None:
    router = FakeRouter()

    async def before(_: int) -> None:
        await asyncio.Event().wait()

    router.before = before
    async with wired(router) as (client, _):
        await client.models()  # the deadline is not for the connection
        with pytest.raises(DeadlineExceeded):
            [event async for event in client.generate("hello", deadline_seconds=2.0)]
        await router.was_cancelled.wait()


async def test_closing_an_answer_cancels_it_at_the_router() -> None:
    router = FakeRouter(num_tokens=10_000)
    async with wired(router) as (client, _):
        async with aclosing(client.generate("hello")) as events:
            async for event in events:
                if isinstance(event, TokenChunk):
                    break
        await router.was_cancelled.wait()


async def test_a_closed_client_says_so() -> None:
    async with serving(FakeRouter()) as address:
        client = Client(address)
        await client.close()
        with pytest.raises(Cancelled):
            await client.models()


async def test_an_api_key_goes_with_every_call() -> None:
    router = FakeRouter()
    async with serving(router) as address, Client(address, api_key="s3cret") as client:
        await collected(client)
    assert router.authorizations == ["Bearer s3cret"]


async def test_questions_are_answered_with_values() -> None:
    async with serving(FakeRouter()) as address, Client(address) as client:
        assert await client.models() == (CARD,)
        assert await client.explain("some-id") == (ROUTE,)
        (event,) = await client.trace("some-id")
        assert (event.role, event.event) == ("router", "received")
        assert await client.tokenize("hello") == (0, 1, 2)


async def test_a_question_is_asked_again_over_a_new_connection() -> None:
    router = FakeRouter()
    async with wired(router) as (client, wire):
        cut_once_before(router, wire, -1)
        assert await client.explain("some-id") == (ROUTE,)
        assert wire.num_cuts == 1


async def test_prompts_come_in_three_forms() -> None:
    router = FakeRouter(num_tokens=1)
    turns = [ChatTurn("user", "hi")]
    async with serving(router) as address, Client(address) as client:
        for prompt in ([5, 6], turns, [{"role": "user", "content": "hi"}]):
            [event async for event in client.generate(prompt)]
    ids, values, mappings = (request.prompt for request in router.requests)
    assert ids.token_ids == b"\x05\0\0\0\x06\0\0\0"
    assert values == mappings
    assert values.chat.messages[0].content == "hi"


@pytest.mark.parametrize(
    "prompt",
    [
        pytest.param([1, "two"], id="a mixture"),
        pytest.param([-1], id="a negative token id"),
        pytest.param([{"role": "user"}], id="a turn without content"),
        pytest.param([True], id="a truth value"),
    ],
)
async def test_a_prompt_of_no_known_form_is_refused(prompt: object) -> None:
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(InvalidRequest):
            client.generate(prompt)  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), 1e9])
async def test_a_deadline_that_means_nothing_is_refused(seconds: float) -> None:
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(InvalidRequest):
            client.generate("hello", deadline_seconds=seconds)
