"""Every kind of bad input has its status and message, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from tests.harness.router import QUICK, FaultStage, Pause, RouterCluster, cluster, collect

from ferryman.wire.v1 import inference_pb2 as pb
from ferryman.wire.v1 import types_pb2

BIG = 9 << 20
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]


def _chat(**more: Any) -> dict[str, Any]:
    return {"messages": HELLO, "max_tokens": 2, **more}


def _text(**more: Any) -> dict[str, Any]:
    return {"prompt": "hi", "max_tokens": 2, **more}


TABLE: list[tuple[str, str, dict[str, Any], int, str]] = [
    ("empty prompt", TEXT, _text(prompt=""), 400, "prompt"),
    ("empty list", TEXT, _text(prompt=[]), 400, "prompt"),
    ("no prompt", TEXT, {"max_tokens": 2}, 400, "prompt"),
    ("prompt of a wrong type", TEXT, _text(prompt={"a": 1}), 400, "prompt"),
    ("token id out of range", TEXT, _text(prompt=[1, 400]), 400, "prompt"),
    ("negative token id", TEXT, _text(prompt=[-1]), 400, "prompt"),
    ("mixed token ids", TEXT, _text(prompt=[1, "a"]), 400, "prompt"),
    ("true as a token id", TEXT, _text(prompt=[1, True]), 400, "prompt"),
    ("prompt too long", TEXT, _text(prompt=[1] * 512), 400, "prompt"),
    ("huge max_tokens", TEXT, _text(max_tokens=10**12), 400, "max_tokens"),
    ("more than there is room for", TEXT, _text(max_tokens=512), 400, "max_tokens"),
    ("zero max_tokens", TEXT, _text(max_tokens=0), 400, "max_tokens"),
    ("fractional max_tokens", TEXT, _text(max_tokens=1.5), 400, "max_tokens"),
    ("negative temperature", TEXT, _text(temperature=-0.1), 400, "temperature"),
    ("temperature that no float holds", TEXT, _text(temperature=10**400), 400, "temperature"),
    ("temperature as text", TEXT, _text(temperature="1"), 400, "temperature"),
    ("top_p of zero", TEXT, _text(top_p=0), 400, "top_p"),
    ("top_k below -1", TEXT, _text(top_k=-2), 400, "top_k"),
    ("min_p above one", TEXT, _text(min_p=2), 400, "min_p"),
    ("penalty out of range", TEXT, _text(presence_penalty=3), 400, "presence_penalty"),
    ("seed as text", TEXT, _text(seed="x"), 400, "seed"),
    ("too many stop strings", TEXT, _text(stop=["a"] * 17), 400, "stop"),
    ("stop string too long", TEXT, _text(stop="a" * 257), 400, "stop"),
    ("empty stop string", TEXT, _text(stop=""), 400, "stop"),
    ("half a character as a stop string", TEXT, _text(stop="\ud800"), 400, "stop"),
    ("too many stop tokens", TEXT, _text(stop_token_ids=[1] * 1025), 400, "stop_token_ids"),
    ("stop of a wrong type", TEXT, _text(stop=[1]), 400, "stop"),
    ("stop token out of range", TEXT, _text(stop_token_ids=[400]), 400, "stop_token_ids"),
    ("stream as text", TEXT, _text(stream="yes"), 400, "stream"),
    ("stream_options alone", TEXT, _text(stream_options={}), 400, "stream_options"),
    ("ignore_eos as a number", TEXT, _text(ignore_eos=1), 400, "ignore_eos"),
    ("too many logprobs", TEXT, _text(logprobs=21), 400, "logprobs"),
    ("no answer", TEXT, _text(n=0), 400, "n"),
    ("least length too long", TEXT, _text(min_tokens=3), 400, "min_tokens"),
    ("least length as text", TEXT, _text(min_tokens="1"), 400, "min_tokens"),
    ("bias of no token", TEXT, _text(logit_bias={"x": 1}), 400, "logit_bias"),
    ("bias beyond the vocabulary", TEXT, _text(logit_bias={"400": 1}), 400, "logit_bias"),
    ("bias as text", TEXT, _text(logit_bias={"1": "1"}), 400, "logit_bias"),
    ("nothing allowed", TEXT, _text(allowed_token_ids=[]), 400, "allowed_token_ids"),
    ("too much allowed", TEXT, _text(allowed_token_ids=[400]), 400, "allowed_token_ids"),
    ("bad word of nothing", TEXT, _text(bad_words=[" "]), 400, "bad_words"),
    ("too many bad words", TEXT, _text(bad_words=["a"] * 65), 400, "bad_words"),
    ("bad word with too many tokens", TEXT, _text(bad_words=["xy" * 100]), 400, "bad_words"),
    ("field that is not offered", TEXT, _text(use_beam_search=True), 400, "use_beam_search"),
    ("echo of a wrong type", TEXT, _text(echo=3), 400, "echo"),
    ("unknown model", TEXT, _text(model="gpt"), 404, "model"),
    ("model of a wrong type", TEXT, _text(model=7), 400, "model"),
    ("no messages", CHAT, {"max_tokens": 2}, 400, "messages"),
    ("message of a wrong type", CHAT, _chat(messages=["hi"]), 400, "messages[0]"),
    ("unknown role", CHAT, _chat(messages=[{"role": "x"}]), 400, "messages[0].role"),
    (
        "no content",
        CHAT,
        _chat(messages=[{"role": "user"}]),
        400,
        "messages[0].content",
    ),
    ("top_logprobs alone", CHAT, _chat(top_logprobs=2), 400, "top_logprobs"),
    ("tool without a type", CHAT, _chat(tools=[{}]), 400, "tools[0].type"),
    (
        "response format",
        CHAT,
        _chat(response_format={"type": "yaml"}),
        400,
        "response_format.type",
    ),
]


async def test_bad_fields_are_named(one_pair: RouterCluster) -> None:
    for name, path, body, status, param in TABLE:
        response = await one_pair.http.post(path, content=json.dumps(body))
        assert response.status_code == status, (name, response.text)
        error = response.json()["error"]
        assert error["param"] == param, name
        assert error["message"], name
        assert error["type"] in ("invalid_request_error", "not_found_error"), name
    assert len(one_pair.router.components.frontend.requests) == 0
    assert one_pair.prefills[0].orders == []


BODIES: list[tuple[str, bytes, str]] = [
    ("not JSON", b"{", "JSON"),
    ("not an object", b"[1]", "object"),
    ("NaN", b'{"prompt": "a", "temperature": NaN}', "NaN"),
    ("Infinity", b'{"prompt": "a", "top_p": -Infinity}', "Infinity"),
    ("too large a number", b'{"prompt": "a", "top_p": 1e999}', "1e999"),
    ("invalid UTF-8", b'{"prompt": "\xff"}', "UTF-8"),
    ("a lone surrogate", b'{"prompt": "\\ud800"}', "Unicode"),
    ("deeply nested", b'{"prompt": ' + b"[" * 100_000, ""),
    ("empty", b"", "the body is empty; send a JSON object"),
    ("nothing but white space", b" \r\n", "the body is empty"),
    ("a mark of UTF-8", b'\xef\xbb\xbf{"prompt": "a"}', "(BOM) of UTF-8"),
    ("UTF-16", '{"prompt": "a"}'.encode("utf-16"), "(BOM) of UTF-16"),
    ("UTF-16 the other way", b"\xfe\xff\x00{\x00}", "(BOM) of UTF-16"),
    ("UTF-32", '{"prompt": "a"}'.encode("utf-32"), "(BOM) of UTF-32"),
]


async def test_bad_bodies_say_what_is_wrong(one_pair: RouterCluster) -> None:
    for name, body, word in BODIES:
        response = await one_pair.http.post(TEXT, content=body)
        assert response.status_code == 400, (name, response.text)
        assert word in response.json()["error"]["message"], name


HALF = "cut \ud83d"
TOOL = {"type": "function", "function": {"name": "a", "description": HALF}}
HALVES: list[tuple[str, dict[str, Any], str]] = [
    (TEXT, _text(user=HALF), "user"),
    (TEXT, _text(prompt=["a", HALF]), "prompt[1]"),
    (TEXT, _text(unknown=[{"a": [1, HALF]}]), "unknown[0].a[1]"),
    (TEXT, _text(logit_bias={HALF: 1}), "logit_bias.(key)"),
    (CHAT, _chat(messages=[*HELLO, {"role": "user", "content": HALF}]), "messages[1].content"),
    (CHAT, _chat(tools=[TOOL]), "tools[0].function.description"),
    (CHAT, _chat(metadata={"a": HALF}), "metadata.a"),
    ("/v1/responses", {"input": "a", "metadata": {"a": HALF}}, "metadata.a"),
    ("/v1/responses", {"input": "a", "instructions": HALF}, "instructions"),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 2, "system": HALF}, "system"),
    ("/v1/messages/count_tokens", {"messages": HELLO, "system": HALF}, "system"),
    ("/tokenize", {"prompt": HALF}, "prompt"),
]


@pytest.mark.parametrize("padding", [0, 100_000], ids=["small", "large"])
async def test_half_a_character_is_named_wherever_it_is(
    one_pair: RouterCluster, padding: int
) -> None:
    for path, body, param in HALVES:
        sent = json.dumps({**body, "padding": "\U0001f600" * padding})
        response = await one_pair.http.post(path, content=sent)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), (path, error)
        assert "Unicode" in error["message"]
    body = {"prompt": "\U0001f600 \\ud83d", "max_tokens": 2}  # a whole one, and a text about one
    whole = await one_pair.http.post(TEXT, content=json.dumps(body))
    assert whole.status_code == 200, whole.text


async def test_of_a_field_that_is_there_twice_the_last_one_counts(one_pair: RouterCluster) -> None:
    body = b'{"prompt": "hi", "max_tokens": 1, "max_tokens": 3, "prompt": "the ferry"}'
    answer = (await one_pair.http.post(TEXT, content=body)).json()
    assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({"x-request-id": b"a\xa0b"}, "x-request-id"),
        ({"x-request-id": "a" * 129}, "x-request-id"),
        ({"x-ferryman-deadline-ms": "0"}, "x-ferryman-deadline-ms"),
        ({"x-ferryman-deadline-ms": "soon"}, "x-ferryman-deadline-ms"),
    ],
    ids=["unprintable", "long id", "no time at all", "no number"],
)
async def test_bad_headers_are_named(
    one_pair: RouterCluster, headers: dict[str, Any], param: str
) -> None:
    response = await one_pair.http.post(TEXT, json=_text(), headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


# LiteLLM knows an overflow by either of these words; LangChain by "prompt is too long".
OVERFLOWS = ("this model's maximum context length is", "is longer than the model's context length")


async def test_what_does_not_fit_says_so_by_its_code_and_in_words_that_clients_know(
    one_pair: RouterCluster,
) -> None:
    long = [_text(prompt=[1] * 600), _text(prompt="a" * 600), _text(prompt="a" * 60_000)]
    for body in (*long, _text(max_tokens=599)):
        response = await one_pair.http.post(TEXT, json=body)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded"), error
        assert any(phrase in error["message"] for phrase in OVERFLOWS), error
        assert error["message"].startswith("prompt is too long") == ("prompt" == error["param"])


# What Claude Code reads of an overflow.
NUMBERS = (
    r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)",
    r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+)",
)


@pytest.mark.parametrize(
    ("path", "body", "params"),
    [
        (TEXT, {"prompt": None}, ("prompt", "max_tokens")),
        (CHAT, {"messages": None}, ("messages", "max_tokens")),
        ("/v1/responses", {"input": None}, ("input", "max_output_tokens")),
        ("/v1/messages", {"messages": None}, ("messages", "max_tokens")),
    ],
)
async def test_an_overflow_is_told_in_the_words_of_each_protocol(
    one_pair: RouterCluster, path: str, body: dict[str, Any], params: tuple[str, str]
) -> None:
    (field,), limit = body, params[1]

    def asked(num_chars: int, num_tokens: int) -> dict[str, Any]:
        text = "a" * num_chars
        prompt = [{"role": "user", "content": text}] if field == "messages" else text
        return {field: prompt, limit: num_tokens}

    for num_chars in (600, 60_000, 300_000):
        response = await one_pair.post(path, **asked(num_chars, 1))
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded"), error
        assert error["param"] == params[0]
        (numbers,) = re.findall(NUMBERS[0], error["message"])
        assert int(numbers[0]) > int(numbers[1]) == 511
        assert any(phrase in error["message"] for phrase in OVERFLOWS)
    error = (await one_pair.post(path, **asked(10, 510))).json()["error"]
    assert error["param"] == limit
    ((prompt_len, max_tokens, context),) = re.findall(NUMBERS[1], error["message"])
    assert int(prompt_len) + int(max_tokens) > int(context) == 512


async def test_an_oversized_body_is_refused_whether_announced_or_not(
    one_pair: RouterCluster,
) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(9):
            yield b" " * (1 << 20)

    announced = await one_pair.http.post(TEXT, content=b" " * BIG)
    assert (announced.status_code, announced.json()["error"]["code"]) == (413, "too_large")
    streamed = await one_pair.http.post(TEXT, content=parts())
    assert (streamed.status_code, streamed.json()["error"]["code"]) == (413, "too_large")


async def test_a_client_that_leaves_while_it_uploads_is_no_error(
    one_pair: RouterCluster, caplog: pytest.LogCaptureFixture
) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", one_pair.router.http_port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n{")
    await writer.drain()
    writer.close()
    left = 'ferryman_router_responses_total{door="http",status="499"} 1.0'
    async with asyncio.timeout(120):
        while left not in (await one_pair.http.get("/metrics")).text:
            pass
    assert not [one for one in caplog.records if one.exc_info or one.levelname == "ERROR"]


async def test_a_deadline_of_a_millisecond_is_a_timeout_that_frees_everything(
    one_pair: RouterCluster,
) -> None:
    gate = one_pair.prefills[0].suffers(Pause(FaultStage.COMMIT))
    headers = {"x-ferryman-deadline-ms": "1", "x-request-id": "quick-1"}
    response = await one_pair.http.post(TEXT, json=_text(), headers=headers)
    assert (response.status_code, response.json()["error"]["type"]) == (504, "timeout_error")
    assert await one_pair.life_of("quick-1") in (
        ["received", "cancelled"],
        ["received", "routed", "cancelled"],
    )
    assert len(one_pair.router.components.frontend.requests) == 0
    gate.release()


async def test_unknown_paths_and_methods_are_errors_of_the_same_form(
    one_pair: RouterCluster,
) -> None:
    missing = await one_pair.http.get("/v1/nothing")
    assert (missing.status_code, "message" in missing.json()["error"]) == (404, True)
    wrong = await one_pair.http.get(TEXT)
    assert (wrong.status_code, "message" in wrong.json()["error"]) == (405, True)


async def test_with_api_keys_everybody_needs_one(nats_url: str, folder: Path) -> None:
    async with cluster(nats_url, folder, api_keys="one, two") as made:
        refused = await made.complete(max_tokens=2)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "unauthenticated")
        assert (await made.http.get("/v1/models")).status_code == 401
        for key in ("one", "two"):
            headers = {"authorization": f"Bearer {key}"}
            served = await made.http.post(TEXT, json=_text(), headers=headers)
            assert served.status_code == 200
        salts = {order.context.tenant_salt for order in made.prefills[0].orders}
        assert len(salts - {b""}) == 2
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await made.stub.ListModels(pb.ListModelsRequest())
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_without_workers_requests_are_unavailable(nats_url: str, folder: Path) -> None:
    async with cluster(nats_url, folder, num_decodes=0) as made:
        ready = await made.http.get("/ready")
        assert (ready.status_code, ready.json()["workers"]) == (503, {"prefill": 1, "decode": 0})
        refused = await made.complete(max_tokens=2)
        assert refused.status_code == 503
        assert "decode" in refused.json()["error"]["message"]


async def test_a_full_queue_says_when_to_come_back(nats_url: str, folder: Path) -> None:
    limits = QUICK.model_copy(update={"max_queued": 1, "no_worker_seconds": 5.0})
    async with cluster(nats_url, folder, num_decodes=0, limits=limits) as made:
        waiting = asyncio.ensure_future(made.complete(max_tokens=2))
        await made.until_queued(1)
        refused = await made.complete(max_tokens=2)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        waiting.cancel()


def _prompt(**form: Any) -> pb.Prompt:
    return pb.Prompt(**form)


GRPC: list[tuple[str, pb.GenerateRequest, grpc.StatusCode]] = [
    ("no prompt", pb.GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT),
    (
        "empty prompt",
        pb.GenerateRequest(prompt=_prompt(text="")),
        grpc.StatusCode.INVALID_ARGUMENT,
    ),
    (
        "token id out of range",
        pb.GenerateRequest(prompt=_prompt(token_ids=b"\x00\x00\x01\x00")),
        grpc.StatusCode.INVALID_ARGUMENT,
    ),
    (
        "half a token id",
        pb.GenerateRequest(prompt=_prompt(token_ids=b"\x00\x00")),
        grpc.StatusCode.INVALID_ARGUMENT,
    ),
    (
        "prompt too long",
        pb.GenerateRequest(prompt=_prompt(token_ids=bytes(4 * 512))),
        grpc.StatusCode.INVALID_ARGUMENT,
    ),
    (
        "NaN",
        pb.GenerateRequest(
            prompt=_prompt(text="a"),
            sampling=types_pb2.SamplingParams(temperature=float("nan")),
        ),
        grpc.StatusCode.INVALID_ARGUMENT,
    ),
    (
        "huge max_tokens",
        pb.GenerateRequest(
            prompt=_prompt(text="a"), sampling=types_pb2.SamplingParams(max_tokens=2**40)
        ),
        grpc.StatusCode.INVALID_ARGUMENT,
    ),
    (
        "too many stop strings",
        pb.GenerateRequest(
            prompt=_prompt(text="a"), sampling=types_pb2.SamplingParams(stop=["a"] * 17)
        ),
        grpc.StatusCode.INVALID_ARGUMENT,
    ),
    (
        "unknown model",
        pb.GenerateRequest(prompt=_prompt(text="a"), model="gpt"),
        grpc.StatusCode.NOT_FOUND,
    ),
    (
        "bad request id",
        pb.GenerateRequest(prompt=_prompt(text="a"), request_id="a b"),
        grpc.StatusCode.INVALID_ARGUMENT,
    ),
    (
        "no request's id",
        pb.GenerateRequest(prompt=_prompt(text="a"), request_id="_"),
        grpc.StatusCode.INVALID_ARGUMENT,
    ),
    (
        "nothing to resume",
        pb.GenerateRequest(prompt=_prompt(text="a"), request_id="r", resume_from_offset=3),
        grpc.StatusCode.NOT_FOUND,
    ),
    (
        "too large a message",
        pb.GenerateRequest(prompt=_prompt(text="a" * (5 << 20))),
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    ),
]


async def test_grpc_refuses_with_its_statuses(one_pair: RouterCluster) -> None:
    for name, request, code in GRPC:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(one_pair.stub.Generate(request, timeout=120))
        assert caught.value.code() is code, (name, caught.value.details())
        assert caught.value.details(), name
    assert len(one_pair.router.components.frontend.requests) == 0
    assert one_pair.prefills[0].orders == []


async def test_grpc_deadlines_of_a_millisecond_pass(one_pair: RouterCluster) -> None:
    request = pb.GenerateRequest(
        prompt=_prompt(text="a"), sampling=types_pb2.SamplingParams(max_tokens=100)
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(one_pair.stub.Generate(request, timeout=0.001))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
