"""Clients that begin and stop are closed, and others are served; over real sockets."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest
from starlette.types import Receive, Scope, Send
from tests.skipped_time import skipped_time
from uvicorn.config import Config
from uvicorn.server import ServerState

from ferryman.runtime.connections import ConnectionLimits, ConnectionTable, within_file_limit
from ferryman.runtime.http_protocol import AnswerDate
from ferryman.runtime.http_server import listening
from ferryman.settings.groups import ListenSettings

NUM_CONNECTIONS = int(os.environ.get("FERRYMAN_TEST_CONNECTIONS", "100"))  # of each kind
SHORT = ConnectionLimits(
    max_connections=1 << 20,
    max_per_address=1 << 20,
    header_seconds=0.3,
    body_seconds=0.3,
    drain_seconds=0.3,
)
PATIENT = ConnectionLimits(header_seconds=600, body_seconds=600, drain_seconds=600)

POST = b"POST /read HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n%s\r\n"
BEGINNINGS = {
    "nothing": b"",
    "half a head": b"POST /read HTTP/1.1\r\nhost",
    "blank lines": b"\r\n\r\n",
    "half a body": POST % (10, b"") + b"1234",
    "half a chunk": b"POST /read HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n8\r\n12",
    "a body nobody reads": (POST % (1 << 20, b"")).replace(b"/read", b"/skip") + b"1234",
    "a second head": b"GET /read HTTP/1.1\r\nhost: a\r\n\r\nGET /re",
}


async def _app(scope: Scope, receive: Receive, send: Send) -> None:
    """`/read` answers with the size after the whole body, any other path at once with 413."""
    status, num_bytes = 413, 0
    if scope["path"] == "/read":
        more, status = True, 200
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            num_bytes += len(message.get("body", b""))
            more = message["more_body"]
    body = str(num_bytes).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class HttpPeer:
    """A client that sends any bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer

    async def answer(self) -> bytes:
        """All bytes until the server closes."""
        async with asyncio.timeout(120):
            return await self.rest()

    async def rest(self) -> bytes:
        """As `answer`, without a time limit."""
        try:
            return await self._reader.read()
        except ConnectionResetError:
            return b"reset"

    async def head(self) -> bytes:
        async with asyncio.timeout(120):
            return await self._reader.readuntil(b"\r\n\r\n")

    async def send_until_closed(self, most: int) -> int:
        """The number of bytes that could be sent."""
        sent = 0
        try:
            while sent < most:
                self.writer.write(b"x" * (1 << 16))
                await self.writer.drain()
                sent += 1 << 16
                await asyncio.sleep(0)
        except ConnectionError:
            pass
        return sent

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except ConnectionError:
            pass


@asynccontextmanager
async def _peer(port: int, beginning: bytes, address: str = "127.0.0.1") -> AsyncIterator[HttpPeer]:
    streams = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
    peer = HttpPeer(*streams)
    try:
        peer.writer.write(beginning)
        yield peer
    finally:
        await peer.close()


async def _is_served(port: int, address: str = "127.0.0.1") -> bool:
    request = POST % (3, b"connection: close\r\n") + b"abc"
    async with _peer(port, request, address) as peer:
        return (await peer.answer()).startswith(b"HTTP/1.1 200 OK")


async def _until_served(port: int) -> None:
    """Tries until served: on a busy machine a request may be slow, or no place free yet."""
    async with asyncio.timeout(120):
        while not await _is_served(port):
            pass


@pytest.mark.parametrize("beginning", BEGINNINGS.values(), ids=BEGINNINGS)
async def test_who_begins_and_does_not_go_on_is_closed(beginning: bytes) -> None:
    async def one(port: int) -> bytes:
        async with _peer(port, beginning) as peer:
            return await peer.answer()

    async with listening(_app, ListenSettings(), limits=SHORT) as port:
        async with asyncio.TaskGroup() as group:
            answers = [group.create_task(one(port)) for _ in range(NUM_CONNECTIONS)]
            await _until_served(port)
        last = {answer.result().rpartition(b"HTTP/1.1 ")[2][:3] for answer in answers}
        assert last <= {b"408", b"413", b"", b"res"} or last == {b"200"}, last  # the first
        await _until_served(port)


async def test_a_byte_now_and_then_gains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = ConnectionLimits(header_seconds=600, body_seconds=600)
    async with listening(_app, ListenSettings(), limits=limits) as port:
        time = skipped_time(monkeypatch)
        for beginning in (POST % (1 << 20, b""), b"GET /read HTTP/1.1\r\nx: "):
            async with _peer(port, beginning) as peer:
                answer = asyncio.ensure_future(peer.rest())
                for _ in range(4):
                    if not answer.done():
                        peer.writer.write(b"1")
                        await time.skip(200)
                await asyncio.wait({answer}, timeout=120)
                assert answer.done(), "the clock runs from the beginning, not from the last byte"
                assert b" 408 " in answer.result()


async def test_clients_that_take_their_time_within_it_are_served() -> None:
    async with listening(_app, ListenSettings(), limits=PATIENT) as port:
        async with _peer(port, b"") as peer:
            for _ in range(2):  # and again on the same connection
                for byte in POST % (3, b"") + b"abc":
                    peer.writer.write(bytes([byte]))
                    await asyncio.sleep(0)
                assert (await peer.head()).startswith(b"HTTP/1.1 200")
                await peer._reader.readexactly(1)


@pytest.mark.parametrize("limit", ["max_per_address", "max_connections"])
async def test_connections_are_bounded_and_those_that_leave_make_room(limit: str) -> None:
    limits = replace(PATIENT, **{limit: 3})
    async with listening(_app, ListenSettings(), limits=limits) as port:
        async with _peer(port, b"") as first, _peer(port, b"") as second, _peer(port, b"") as third:
            for peer in (first, second, third):
                peer.writer.write(POST % (1, b""))
                await peer.writer.drain()
            async with _peer(port, b"") as fourth:
                refused = await fourth.answer()
            assert refused.startswith(b"HTTP/1.1 503 ")
            assert json.loads(refused.partition(b"\r\n\r\n")[2])["error"]["message"]
            elsewhere = await _is_served(port, "127.0.0.2")
            assert elsewhere is (limit == "max_per_address")
            first.writer.write(b"1")
            assert (await first.head()).startswith(b"HTTP/1.1 200"), "those inside go on"
            await second.close()
            await _until_served(port)


@pytest.mark.parametrize("header", [b"", b"connection: close\r\n"], ids=["kept", "closed"])
async def test_an_answer_before_the_body_is_read_by_a_client_that_reads_last(
    header: bytes,
) -> None:
    size = 4 << 20
    request = (POST % (size, header)).replace(b"/read", b"/skip")
    async with listening(_app, ListenSettings(), limits=PATIENT) as port:
        async with _peer(port, request) as peer:
            # the answer has arrived, and the client still sends
            assert b" 413 " in await peer.head()
            peer.writer.write(b"x" * size)
            await peer.writer.drain()
            if header:
                assert b"reset" not in await peer.answer()
            else:
                peer.writer.write(POST % (1, b"") + b"1")
                assert b" 200 " in (await peer.head())[1:]


async def test_no_more_is_dropped_than_the_bound() -> None:
    limits = replace(PATIENT, drain_bytes=1 << 20)
    request = (POST % (1 << 30, b"")).replace(b"/read", b"/skip")
    async with listening(_app, ListenSettings(), limits=limits) as port:
        async with _peer(port, request) as peer:
            sent = await peer.send_until_closed(1 << 28)
    assert sent < 1 << 28


CHUNKED = b"POST /read HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
PADDING = b"x" * (1 << 20)
FRAMING = {
    "an extension": b"3;a=" + PADDING + b"\r\nabc\r\n0\r\n\r\n",
    "many extensions": (b"1;a=" + b"x" * 1000 + b"\r\na\r\n") * 1000 + b"0\r\n\r\n",
    "a trailer": b"3\r\nabc\r\n0\r\na: " + PADDING + b"\r\n\r\n",
    "digits of a size": b"0" * (1 << 20) + b"3\r\nabc\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("body", FRAMING.values(), ids=FRAMING.keys())
async def test_a_body_with_far_more_framing_than_content_is_refused(body: bytes) -> None:
    async with listening(_app, ListenSettings(), limits=PATIENT) as port:
        async with _peer(port, CHUNKED) as peer:
            await peer.writer.drain()
            for first in range(0, len(body), 1 << 14):
                peer.writer.write(body[first : first + (1 << 14)])
                await asyncio.sleep(0)
            answer = await peer.answer()
            assert answer.startswith(b"HTTP/1.1 413 ") or answer == b"reset"
        assert await _is_served(port)


async def test_a_body_in_chunks_of_a_byte_is_read() -> None:
    body = b"1\r\na\r\n" * 100_000 + b"0\r\n\r\n"
    async with listening(_app, ListenSettings(), limits=PATIENT) as port:
        async with _peer(port, CHUNKED + body) as peer:
            assert (await peer.head()).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("limit", ["max_per_address", "max_connections"])
async def test_connections_without_a_request_shut_out_nobody_behind_a_proxy(limit: str) -> None:
    limits = replace(PATIENT, **{limit: 3})
    async with listening(_app, ListenSettings(), limits=limits) as port:
        async with _peer(port, POST % (1, b"")) as begun, _peer(port, b"PO"), _peer(port, b""):
            await _until_served(port)
            assert await _is_served(port), "again and again"
            begun.writer.write(b"1")
            assert (await begun.head()).startswith(b"HTTP/1.1 200"), "whoever began goes on"


async def test_a_head_without_end_is_refused() -> None:
    async with listening(_app, ListenSettings(), limits=PATIENT) as port:
        async with _peer(port, b"GET /read HTTP/1.1\r\n") as peer:
            answer = asyncio.ensure_future(peer.answer())
            while not answer.done():
                peer.writer.write(b"x: " + b"y" * 1000 + b"\r\n")
                await asyncio.wait({answer}, timeout=0.001)
            assert b" 431 " in answer.result() or answer.result() == b"reset"


def test_refusals_are_said_once_a_second(caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    table = ConnectionTable(replace(PATIENT, max_per_address=1), clock=lambda: now[0])
    assert table.enter("a")
    with caplog.at_level(logging.WARNING):
        for step in range(1000):
            now[0] = 100.0 + step * 0.01  # ten seconds
            assert not table.enter("a")
    assert len(caplog.records) == 10
    assert sum(int(one.getMessage().split("num=")[1].split(",")[0]) for one in caplog.records) > 900


def test_a_table_forgets_who_left() -> None:
    table = ConnectionTable(replace(PATIENT, max_per_address=2))
    for _ in range(5):
        assert table.enter("a")
        assert table.enter("a")
        assert not table.enter("a")
        table.leave("a")
        table.leave("a")
    assert len(table) == 0
    assert not table._by_address


def test_connections_leave_files_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, wanted, most in ((1024, 8192, 768), (20_000, 8192, 8192), (100, 8192, 1)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, s=soft: (s, s))
        assert within_file_limit(wanted) == most
    endless = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda _: (endless, endless))
    assert within_file_limit(8192) == 8192


def test_answers_have_the_date_of_the_second_in_which_the_request_came() -> None:
    seconds = iter([1_000_000_000.25, 1_000_000_000.75, 1_000_000_001.0])
    date, state, config = AnswerDate(lambda: next(seconds)), ServerState(), Config(_app)
    config.encoded_headers = [(b"server", b"ours")]
    found = []
    for _ in range(3):
        date.renew(state, config)
        found.append(state.default_headers)
    assert found[0] == [(b"date", b"Sun, 09 Sep 2001 01:46:40 GMT"), (b"server", b"ours")]
    assert found[1] is found[0]
    assert found[2][0] == (b"date", b"Sun, 09 Sep 2001 01:46:41 GMT")


async def test_every_answer_has_a_date() -> None:
    async with (
        listening(_app, ListenSettings(port=0)) as port,
        _peer(port, b"GET /read HTTP/1.1\r\nhost: a\r\n\r\n") as peer,
    ):
        assert b"\r\ndate: " in await peer.head()


async def _endless(scope: Scope, receive: Receive, send: Send) -> None:
    """A stream whose next event never comes; `/bug` fails instead."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"first", "more_body": True})
    if scope["path"] == "/bug":
        raise KeyError("a bug")
    await asyncio.Event().wait()


@pytest.mark.parametrize(("path", "logs_bug"), [(b"/stream", False), (b"/bug", True)])
async def test_a_stream_that_is_open_when_the_server_ends_is_no_bug(
    path: bytes, logs_bug: bool, caplog: pytest.LogCaptureFixture
) -> None:
    request = b"GET " + path + b" HTTP/1.1\r\nhost: a\r\n\r\n"
    with caplog.at_level(logging.INFO):
        async with AsyncExitStack() as stack:
            async with listening(_endless, ListenSettings(), grace_seconds=1.0) as port:
                peer = await stack.enter_async_context(_peer(port, request))
                await peer.head()
            # The server has cancelled it, and is told of its end a step later.
            answer = await peer.answer()
    assert b"first" in answer
    bugs = [record for record in caplog.records if record.exc_info]
    assert bool(bugs) is logs_bug
    cut_off = [record for record in caplog.records if "cut off" in record.getMessage()]
    assert len(cut_off) == (0 if logs_bug else 1)
