"""The bus: messages of services to all listeners, and orders to services with their answers.

Publishing is a plain call that never waits. While the broker is away, published messages are kept
within a bound, requests fail at once with Unavailable, and subscriptions are silent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from ferryman.errors import InvalidRequest, TooLarge
from ferryman.wire.grpc.status import error_of, failure_of
from ferryman.wire.values import Failure

log = logging.getLogger(__name__)

MAX_PAYLOAD_BYTES = 1 << 20
MAX_WAITING_MESSAGES = 65_536
DEADLINE_HEADER = "Ferryman-Deadline-Ms"
# Headers of an error. The first two are those of NATS' own services, so its tools show them.
_MESSAGE, _CODE = "Nats-Service-Error", "Nats-Service-Error-Code"
_REASON, _PARAM, _RETRY = "Ferryman-Reason", "Ferryman-Param", "Ferryman-Retry-After-Ms"


@dataclass(frozen=True, slots=True)
class BusMessage:
    """A message from the bus."""

    subject: str
    payload: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RecordedMessage:
    """One entry of the lifecycle log; `sequence` is the log's own order."""

    subject: str
    payload: bytes
    sequence: int


@dataclass(frozen=True, slots=True)
class Discoverable:
    """The entry of a process in `nats micro ls`. The version is semantic: 1.2.3."""

    name: str
    version: str
    description: str
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BusStatistics:
    """Counts since the start. `num_recorded` of the lifecycle events sent were acknowledged. The
    broker refused `num_forbidden` messages, subscriptions and logins; `num_unproven` answers to
    orders did not come from the process that was ordered."""

    num_sent: int = 0
    num_waiting: int = 0
    num_refused: int = 0
    num_dropped: int = 0
    num_recorded: int = 0
    num_unrecorded: int = 0
    num_missed: int = 0
    num_forbidden: int = 0
    num_unproven: int = 0


Answer = Callable[[BusMessage], Awaitable[bytes]]


class Messages:
    """The messages of one subscription as they come; the iteration ends with its block."""

    def __init__(self, max_waiting: int = MAX_WAITING_MESSAGES) -> None:
        self._queue: asyncio.Queue[BusMessage] = asyncio.Queue(max_waiting)

    def __aiter__(self) -> Messages:
        return self

    async def __anext__(self) -> BusMessage:
        return await self._queue.get()

    def try_put(self, message: BusMessage) -> bool:
        """Whether there was room for the message."""
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            return False
        return True


class Bus(Protocol):
    """The interface of both buses; `tests/wire/test_bus.py` tests both."""

    @property
    def is_connected(self) -> bool: ...

    def publish(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        """Sends in order, after an outage too; raises QueueFull, at once, when too many messages
        wait."""
        ...

    def offer(self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Sends a message that only matters while it is new; when too many wait, drops the
        oldest."""
        ...

    def subscribed(self, pattern: str) -> AbstractAsyncContextManager[Messages]:
        """All messages on matching subjects; a slow listener misses the newest."""
        ...

    def answering(self, pattern: str, answer: Answer) -> AbstractAsyncContextManager[None]:
        """Takes orders, one at a time: the result of `answer`, or its error, goes back to the
        caller."""
        ...

    async def request(self, subject: str, payload: bytes, *, timeout_seconds: float) -> bytes:
        """Asks and waits. Raises Unavailable without a listener or broker, or else the error of
        `answer`."""
        ...

    async def history(self, pattern: str, *, max_events: int) -> tuple[RecordedMessage, ...]:
        """The first entries of the lifecycle log on matching subjects, oldest first."""
        ...

    def discoverable(self, process: Discoverable) -> AbstractAsyncContextManager[None]:
        """Adds an entry to `$SRV` discovery for the length of a block."""
        ...

    def statistics(self) -> BusStatistics: ...


def checked_payload(payload: bytes, max_bytes: int) -> bytes:
    """Checks the size: TooLarge here is better than a connection that the broker closes."""
    if len(payload) > max_bytes:
        raise TooLarge(f"{len(payload)} bytes are more than the bus takes, {max_bytes}", "payload")
    return payload


def matches(pattern: str, subject: str) -> bool:
    """Whether a subject fits: `*` is any one token, a final `>` any tail of at least one."""
    wanted, parts = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted = wanted[:-1]
        if len(parts) <= len(wanted):
            return False
        parts = parts[: len(wanted)]
    return len(wanted) == len(parts) and all(
        want in ("*", have) for want, have in zip(wanted, parts, strict=True)
    )


def check_subject(subject: str) -> str:
    """A subject to publish on: no wildcard, no blank, no empty token."""
    tokens = subject.split(".")
    if not all(tokens) or any(char.isspace() or char in "*>" for char in subject):
        raise InvalidRequest(f"{subject!r} is no subject to publish on", "subject")
    return subject


async def answer_to(message: BusMessage, answer: Answer) -> tuple[bytes, dict[str, str]]:
    """Payload and headers of the answer; an error of `answer` becomes headers."""
    try:
        return await answer(message), {}
    except Exception as error:
        failure = failure_of(error)
        if failure.code == "INTERNAL":
            log.error("order failed subject=%s", message.subject, exc_info=error)
        return b"", _failure_to_headers(failure)


def answer_from(payload: bytes, headers: Mapping[str, str]) -> bytes:
    """Returns the payload, or raises the error in the headers."""
    if _CODE not in headers:
        return payload
    retry_ms = headers.get(_RETRY, "")
    raise error_of(
        Failure(
            code=headers[_CODE],
            reason=headers.get(_REASON, ""),
            message=headers.get(_MESSAGE, ""),
            param=headers.get(_PARAM, ""),
            retry_after_seconds=int(retry_ms) / 1000 if retry_ms.isdecimal() else 0.0,
        )
    )


def _failure_to_headers(failure: Failure) -> dict[str, str]:
    return {
        _MESSAGE: failure.message.replace("\n", " "),
        _CODE: failure.code,
        _REASON: failure.reason,
        _PARAM: failure.param,
        _RETRY: str(round(failure.retry_after_seconds * 1000)),
    }
