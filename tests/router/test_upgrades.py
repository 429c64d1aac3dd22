"""Requests that ask for another protocol, are of one, or wait for a word before their body."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from tests.harness.router import RouterCluster
from tests.router.raw_http import GETS, POSTS, head, raw_client

JSON = "content-type: application/json"
# As Java's HttpClient sends it by default, on the first request of a connection.
H2C = (
    "connection: Upgrade, HTTP2-Settings",
    "http2-settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
    "upgrade: h2c",
)
WEBSOCKET = ("connection: keep-alive, Upgrade", "upgrade: websocket", "sec-websocket-version: 13")


@pytest.mark.parametrize("asks", [H2C, WEBSOCKET], ids=["h2c", "websocket"])
async def test_a_call_that_asks_for_another_protocol_is_answered_in_http1(
    one_pair: RouterCluster, asks: tuple[str, ...]
) -> None:
    async with raw_client(one_pair.router.http_port) as client:
        for path in POSTS:
            for pieces in _cut_calls(path, asks):
                await client.send(*pieces)
                answer = await client.answer()
                assert answer.status == 200, (path, answer.body)
                assert json.loads(answer.body)


def _cut_calls(path: str, asks: tuple[str, ...]) -> Iterator[tuple[bytes, ...]]:
    """One call in the pieces of many networks: by its length and in chunks."""
    body = json.dumps(POSTS[path]).encode()
    call = head(path, JSON, *asks, num_bytes=len(body))
    yield (call + body,)
    yield call, body
    yield call[:40], call[40:] + body[:3], body[3:]
    chunked = head(path, JSON, *asks, "transfer-encoding: chunked")
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    yield chunked, chunks
    yield (chunked + chunks,)


async def test_a_question_that_asks_for_another_protocol_is_answered_too(
    one_pair: RouterCluster,
) -> None:
    async with raw_client(one_pair.router.http_port) as client:
        for path in GETS:
            # Both at once: the second one is behind the head that asks.
            await client.send(head(path, *H2C, method="GET") + head(path, method="GET"))
            assert [(await client.answer()).status for _ in range(2)] == [200, 200], path


async def test_a_stream_that_asks_for_http2_is_a_stream(one_pair: RouterCluster) -> None:
    body = json.dumps({**POSTS["/v1/chat/completions"], "stream": True}).encode()
    call = head("/v1/chat/completions", JSON, *H2C, "accept: */*", num_bytes=len(body))
    async with raw_client(one_pair.router.http_port) as client:
        await client.send(call, body)
        answer = await client.answer()
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert "upgrade" not in answer.headers


async def test_many_heads_at_once_that_ask_are_all_answered(one_pair: RouterCluster) -> None:
    num_heads = 1500
    async with raw_client(one_pair.router.http_port) as client:
        await client.send(head("/ping", *H2C, method="GET") * num_heads)
        answers = [(await client.answer()).status for _ in range(num_heads)]
    assert answers == [200] * num_heads


async def test_no_door_is_a_proxy(one_pair: RouterCluster) -> None:
    async with raw_client(one_pair.router.http_port) as client:
        await client.send(b"CONNECT other.example:443 HTTP/1.1\r\nhost: other.example:443\r\n\r\n")
        answer = await client.answer()
        assert (answer.status, "proxy" in answer.error["message"]) == (400, True)
        assert await client.is_closed()


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET\r\n\r\n",
    ],
    ids=["TLS", "HTTP/2 without asking", "half a line"],
)
async def test_what_is_no_request_gets_an_error_of_the_usual_form(
    one_pair: RouterCluster, sent: bytes
) -> None:
    async with raw_client(one_pair.router.http_port) as client:
        await client.send(sent)
        answer = await client.answer()
        assert (answer.status, answer.error["code"]) == (400, "bad_request")
        assert "retry-after" not in answer.headers
        assert await client.is_closed()


async def test_a_client_that_waits_for_a_word_gets_one(one_pair: RouterCluster) -> None:
    path, expects = "/v1/completions", "expect: 100-continue"
    body = json.dumps(POSTS[path]).encode()
    async with raw_client(one_pair.router.http_port) as client:
        await client.send(head(path, JSON, expects, num_bytes=len(body)))
        assert (await client.answer()).status == 100
        await client.send(body)
        assert (await client.answer()).status == 200
        await client.send(head(path, "content-type: text/plain", expects, num_bytes=1 << 20))
        refused = await client.answer()
        # Without the body, whose end the client need not send, no other call can follow.
        assert (refused.status, refused.headers["connection"]) == (415, "close")


async def test_a_client_that_waits_for_a_word_and_errs_has_its_connection_closed(
    one_pair: RouterCluster,
) -> None:
    expects = "expect: 100-continue"
    async with raw_client(one_pair.router.http_port) as client:
        await client.send(head("/v1/completions", JSON, expects, num_bytes=1))
        assert (await client.answer()).status == 100
        await client.send(b"{")
        refused = await client.answer()
        assert (refused.status, refused.headers["connection"]) == (400, "close")


async def test_a_refusal_before_the_body_leaves_the_connection_to_the_next_call(
    one_pair: RouterCluster,
) -> None:
    plain, body = "content-type: text/plain", b"x" * 100_000
    chunked = head("/v1/completions", plain, "transfer-encoding: chunked")
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    whole = head("/v1/completions", plain, num_bytes=len(body))
    after = head("/version", method="GET")
    async with raw_client(one_pair.router.http_port) as client:
        for pieces in ((whole + body + after,), (whole, body, after), (chunked, chunks + after)):
            await client.send(*pieces)
            assert [(await client.answer()).status for _ in range(2)] == [415, 200]


@pytest.mark.parametrize(
    ("target", "status"),
    [("/v1/mod\xc3\xa9ls", 400), ("*", 404), ("/v1/%ff", 404), ("/v1/models/%2e%2e/x", 404)],
)
async def test_odd_targets_are_refused_in_the_usual_form(
    one_pair: RouterCluster, target: str, status: int
) -> None:
    async with raw_client(one_pair.router.http_port) as client:
        await client.send(head(target, method="OPTIONS" if target == "*" else "GET"))
        answer = await client.answer()
        assert (answer.status, bool(answer.error["message"])) == (status, True)


async def test_headers_without_measure_are_refused_by_name(one_pair: RouterCluster) -> None:
    async with raw_client(one_pair.router.http_port) as client:
        await client.send(head("/version", method="GET")[:-2])
        for _ in range(40):
            await client.send(b"x-long: " + b"y" * 8000 + b"\r\n")
        answer = await client.answer()
        assert (answer.status, answer.error["code"]) == (431, "request_header_fields_too_large")
