"""A server may close a kept connection at the moment at which the next request is sent on it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from ferryman_bench.endpoint.client import EndpointRefusal, open_endpoint
from ferryman_bench.endpoint.inquiry import ChatMessage, Delivery, Inquiry

CARDS = {"data": [{"id": "toy", "owned_by": "closing"}]}
PIECE = {"choices": [{"index": 0, "delta": {"content": "Oslo"}, "finish_reason": "stop"}]}
ANSWER = {"choices": [{"index": 0, "message": {"content": "Oslo"}, "finish_reason": "stop"}]}
INQUIRY = Inquiry((ChatMessage("user", "Where is the kite?"),), 4)


class ClosingServer:
    """Answers `per_connection` requests on each connection, and hangs up on the next one.

    `hung_up` counts those. With `cut` the connection ends in the middle of each stream.
    """

    def __init__(self, per_connection: int, *, cut: bool = False) -> None:
        self.per_connection, self._cut = per_connection, cut
        self.hung_up = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            for _ in range(self.per_connection):
                head, body = await _request(reader)
                writer.write(self._answer(head, body))
                await writer.drain()
                if self._cut and head.startswith("POST"):
                    return
            await _request(reader)
            self.hung_up += 1
        except asyncio.IncompleteReadError:  # the client closed it
            pass
        finally:
            writer.close()

    def _answer(self, head: str, body: bytes) -> bytes:
        if head.startswith("GET"):
            return _whole(CARDS)
        if not json.loads(body).get("stream"):
            return _whole(ANSWER)
        event = f"data: {json.dumps(PIECE)}\n\n".encode()
        chunk = f"{len(event):x}\r\n".encode() + event + b"\r\n"
        end = b"" if self._cut else b"0\r\n\r\n"
        fields = b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        return b"HTTP/1.1 200 OK\r\n" + fields + chunk + end


async def _request(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = head.partition("content-length: ")[2].partition("\r")[0]
    return head.upper(), await reader.readexactly(int(length or 0))


def _whole(value: object) -> bytes:
    body = json.dumps(value).encode()
    return f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


@asynccontextmanager
async def running(server: ClosingServer) -> AsyncIterator[str]:
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("delivery", [Delivery.WHOLE, Delivery.STREAMED])
async def test_a_request_that_a_closing_connection_lost_is_sent_again(delivery: Delivery) -> None:
    server = ClosingServer(per_connection=2)
    async with running(server) as url, open_endpoint(url) as (client, _):
        replies = [await client.ask(INQUIRY, delivery) for _ in range(4)]
    assert [reply.text for reply in replies] == ["Oslo"] * 4
    assert server.hung_up == 2, "the list of models and four questions, two on each connection"


async def test_a_server_that_answers_nothing_is_asked_twice() -> None:
    server = ClosingServer(per_connection=1)
    async with running(server) as url, open_endpoint(url) as (client, _):
        server.per_connection = 0
        with pytest.raises(EndpointRefusal, match="without sending a response"):
            await client.ask(INQUIRY)
    assert server.hung_up == 2


async def test_an_answer_that_breaks_in_the_middle_is_not_asked_again() -> None:
    server = ClosingServer(per_connection=9, cut=True)
    async with running(server) as url, open_endpoint(url) as (client, _):
        with pytest.raises(EndpointRefusal):
            await asyncio.wait_for(client.ask(INQUIRY, Delivery.STREAMED), 60)
    assert server.hung_up == 0
