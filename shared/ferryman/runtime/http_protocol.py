"""uvicorn's HTTP protocol with an end to every wait for a client.

A connection is in one of four states. Three of them are waits that a client could prolong forever:

    head   no request has begun, or its head is not complete   408 after `header_seconds`
    body   a request waits for the rest of its body            408 after `body_seconds`
    drop   it was answered before it was complete              closed after `drain_seconds`
    busy   the whole request is here; the server must answer

A request to go on in another protocol (`Upgrade: h2c`, which Java's client sends by default, or
`websocket`) is answered as if it asked for none, in HTTP/1.1.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from email.utils import formatdate
from enum import StrEnum
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from ferryman.runtime.connections import ConnectionTable

_TOO_MANY = (503, "Service Unavailable", "there are too many connections; try again later")
_TOO_SLOW = (408, "Request Timeout", "the request did not come in time")
_TOO_LONG_HEAD = (431, "Request Header Fields Too Large", "the head of the request is too long")
_TOO_MUCH_FRAMING = (
    413,
    "Content Too Large",
    "the body's chunks have far more beside their content than in it",
)
_UNREADABLE = (400, "Bad Request", "this is no request of HTTP/1.1")
_NO_PROXY = (400, "Bad Request", "this is no proxy: CONNECT opens nothing here")
_TRY_AGAIN = (408, 503)
_WHILE_SENDING = (_TOO_LONG_HEAD, _TOO_MUCH_FRAMING, _UNREADABLE)


class _Waits(StrEnum):
    HEAD = "head"
    BODY = "body"
    DROP = "drop"
    BUSY = "busy"


class AnswerDate:
    """The date of a server's answers. uvicorn's clock renews it every second, and was most of what
    an idle server did; here the first request of a second does."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._second = clock, 0

    def renew(self, state: ServerState, config: Config) -> None:
        """Gives answers from now on the date, among the headers that all have."""
        if (second := int(self._clock())) != self._second:
            self._second = second
            date = (b"date", formatdate(second, usegmt=True).encode())
            state.default_headers = [date, *config.encoded_headers]


class BoundedProtocol(HttpToolsProtocol):
    """One connection of the server with this `table`, whose answers have this `date`."""

    def __init__(self, table: ConnectionTable, date: AnswerDate, **options: Any) -> None:
        super().__init__(**options)
        self._table, self._limits, self._date = table, table.limits, date
        # Clients decide how often uvicorn warns about their input, so warnings are rate-limited.
        self.logger = _RareWarnings(self.logger, table)  # type: ignore[assignment]
        self._is_counted = False
        self._is_refused = False  # and nothing more is read
        self._is_whole = True  # the last request has arrived with its body
        self._num_requests = 0
        self._num_bytes = 0  # since the state below began
        self._num_content = 0  # of the body of the last request
        self._state: tuple[_Waits, int] = (_Waits.BUSY, 0)
        self._timer: asyncio.TimerHandle | None = None

    # The connection.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._is_counted = self._table.enter(self._address)
        if not self._is_counted:
            self._answer_and_close(*_TOO_MANY)
            return
        self._table.wait(self, self._address, self._give_way)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._leave()
        super().connection_lost(exc)

    def _leave(self) -> None:
        if self._is_counted:
            self._is_counted = False
            self._table.begin(self, self._address)
            self._table.leave(self._address)

    def _give_way(self) -> None:
        """Makes room for a connection that may have a request."""
        self._leave()
        self._answer_and_close(*_TOO_MANY)

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    # Input.

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._num_bytes += len(data)
        if not self._is_refused:
            self._parse(data)
        if self.transport.is_closing():
            return
        waits, _ = self._watch()
        if waits is _Waits.HEAD and self._num_bytes > self._limits.header_bytes:
            self._refuse(_TOO_LONG_HEAD)
        framing = self._num_bytes - self._num_content
        if waits is _Waits.BODY and framing > self._limits.most_framing(self._num_content):
            self._refuse(_TOO_MUCH_FRAMING)
        if waits is _Waits.DROP and self._num_bytes > self._limits.drain_bytes:
            self.transport.close()

    def _parse(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        rest = memoryview(data)
        try:
            while rest:
                rest = self._parse_to_upgrade(rest)
        except httptools.HttpParserError:
            self._refuse(_UNREADABLE)

    def _parse_to_upgrade(self, data: memoryview) -> memoryview:
        """Parses up to the end of the first head that asks for another protocol, and says no to
        it. Returns the bytes behind that head."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self.parser.get_method() != b"CONNECT":
                self._decline_upgrade()
                return data[upgrade.args[0] :]
            self._refuse(_NO_PROXY)
        return data[:0]

    def _decline_upgrade(self) -> None:
        """Reads the head again without the header that asks. Its parser has no more use: it takes
        all that follows for the other protocol, the body too."""
        version = self.parser.get_http_version().encode()
        head = [b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, version)]
        head += [b"%b: %b\r\n" % pair for pair in self.headers if pair[0] != b"upgrade"]
        self.parser = _parser_for(self)
        self.parser.feed_data(b"".join(head) + b"\r\n")

    @property
    def _is_upgrade(self) -> bool:
        """Whether the head that is complete is about to be read again."""
        return self.parser.should_upgrade()

    def on_message_begin(self) -> None:
        self._date.renew(self.server_state, self.config)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self._is_upgrade:
            return
        self._is_whole = False
        self._num_requests += 1
        self._num_content = 0
        self._table.begin(self, self._address)
        super().on_headers_complete()
        # If the server closes while the client still sends, the connection is reset, and the client
        # may lose the answer.
        self.cycle.transport = _ClosesWhenWhole(self)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        self._num_content += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_upgrade:
            return
        self._is_whole = True
        super().on_message_complete()
        if self.cycle.response_complete and not self.cycle.keep_alive:
            self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def close_when_whole(self) -> None:
        """Closes now if the whole request has arrived. If not, the end of the request or of the
        drain closes the connection later."""
        if self._is_whole:
            self.transport.close()

    # Time limits.

    def _watch(self) -> tuple[_Waits, int]:
        """Starts the timer of a new state. Within a state it keeps running, so a client gains no
        time by sending a byte now and then."""
        state = (self._waits(), self._num_requests)
        if state != self._state:
            self._state, self._num_bytes = state, 0
            self._stop_timer()
            seconds = {
                _Waits.HEAD: self._limits.header_seconds,
                _Waits.BODY: self._limits.body_seconds,
                _Waits.DROP: self._limits.drain_seconds,
            }.get(state[0])
            if seconds is not None:
                self._timer = self.loop.call_later(seconds, self._too_late)
        return state

    def _waits(self) -> _Waits:
        if self._is_refused:
            return _Waits.DROP
        is_answered = self.cycle is None or self.cycle.response_complete
        if self._is_whole:
            return _Waits.HEAD if is_answered and not self.pipeline else _Waits.BUSY
        return _Waits.DROP if is_answered else _Waits.BODY

    def _too_late(self) -> None:
        self._timer = None
        if self._state[0] is _Waits.DROP or self.transport.is_closing():
            self.transport.close()
        elif self._state[0] is _Waits.HEAD and not self._num_bytes:
            self.transport.close()  # the client sent no request, so no answer is due
        else:
            self._refuse(_TOO_SLOW)

    def _refuse(self, answer: tuple[int, str, str]) -> None:
        self._table.refuse(f"{answer[2]}, from {self._address}")
        cycle = self.cycle
        is_free = cycle is None or cycle.response_complete or not cycle.response_started
        if is_free and not self.pipeline and answer in _WHILE_SENDING:
            self._answer_and_drop(*answer)
        elif is_free and not self.pipeline:
            self._answer_and_close(*answer)
        else:
            self.transport.close()  # another answer is already being sent
        if cycle is not None:
            # Wakes a handler that waits for the body; it sees that the client is gone.
            cycle.disconnected = True
            cycle.message_event.set()

    def _answer_and_close(self, status: int, phrase: str, message: str) -> None:
        self._answer(status, phrase, message)
        self.transport.close()

    def _answer_and_drop(self, status: int, phrase: str, message: str) -> None:
        """Answers a client that may still send: closed at once, the connection would be reset, and
        the client might lose the answer."""
        self._answer(status, phrase, message)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._is_refused = True
        self._watch()

    def _answer(self, status: int, phrase: str, message: str) -> None:
        code = phrase.lower().replace(" ", "_")
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        body = json.dumps({"error": error}).encode()
        again = "retry-after: 1\r\n" if status in _TRY_AGAIN else ""
        head = (
            f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n{again}\r\n"
        )
        self.transport.write(head.encode() + body)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _parser_for(protocol: HttpToolsProtocol) -> httptools.HttpRequestParser:
    """A parser as uvicorn makes it: what follows a request that closes is passed over."""
    parser = httptools.HttpRequestParser(protocol)
    with suppress(AttributeError):  # httptools before 0.6.3 does so by itself
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


class _ClosesWhenWhole:
    """The transport that an answer uses: `close` waits for the rest of the request."""

    def __init__(self, protocol: BoundedProtocol) -> None:
        # Its own: each frame of a stream is written by it.
        self.write, self.is_closing = protocol.transport.write, protocol.transport.is_closing
        self.close = protocol.close_when_whole


class _RareWarnings(logging.LoggerAdapter[logging.Logger]):
    """A log whose warnings are counted as refusals. An answer that was cancelled is no error."""

    def __init__(self, logger: logging.Logger, table: ConnectionTable) -> None:
        super().__init__(logger, {})
        self._table = table
        self.level = logger.level

    def warning(self, msg: object, *args: object, **kwargs: Any) -> None:
        self._table.refuse(str(msg))

    def error(self, msg: object, *args: object, **kwargs: Any) -> None:
        # uvicorn cancels the answers that outlast a server's grace, and takes the end of each for a
        # bug of the application.
        if isinstance(kwargs.get("exc_info"), asyncio.CancelledError):
            self.info("an answer was cut off: the server ends")
        else:
            super().error(msg, *args, **kwargs)
