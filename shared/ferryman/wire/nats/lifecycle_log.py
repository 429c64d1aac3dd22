"""The lifecycle log: a JetStream stream that keeps the events of the last hour, and the broker's
traces of those that ask for one.

Publishers do not wait for its acknowledgements; a window bounds how many are outstanding. After an
outage, events without one are sent again, so a listener may see an event twice; the log has it
once.

A broker whose disk was full stores nothing more in a stream, however much room there is again,
until that is removed or the broker begins anew. So a log that stores nothing is made anew.
"""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import DeliverPolicy, DiscardPolicy, RetentionPolicy, StorageType, StreamConfig

from ferryman.errors import Unavailable
from ferryman.wire.nats.bus import RecordedMessage
from ferryman.wire.nats.outbox import OutboundMessage
from ferryman.wire.nats.subjects import ALL_HOPS, PREFIX

log = logging.getLogger(__name__)

TRANSPORT_ERRORS = (RuntimeError, OSError)
"""Raised when the transport was closed and the library has not noticed yet: uvloop raises a
RuntimeError then."""
CALL_ERRORS = (nats.errors.Error, *TRANSPORT_ERRORS)

STREAM = "LIFECYCLE"
ALL_LIFE = f"{PREFIX}.*.life.>"
API_SECONDS = 2.0
MAX_OUTSTANDING = 512
LOOK_SECONDS = 5.0  # between two looks whether the log stores
STATE_SECONDS = 10.0
SERVER_ERROR = 500
NO_JETSTREAM = (10039, 10076)  # nats-server's codes: not enabled, for the account or at all
_MESSAGE_ID = "Nats-Msg-Id"


@dataclass(frozen=True, slots=True)
class LogLimits:
    """The age and the size that the stream keeps; the oldest entries go first."""

    max_age_seconds: float = 3600.0
    max_bytes: int = 64 << 20
    storage: Literal["file", "memory"] = "file"


def _config(limits: LogLimits) -> StreamConfig:
    return StreamConfig(
        name=STREAM,
        subjects=[ALL_LIFE, ALL_HOPS],
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.OLD,
        max_age=limits.max_age_seconds,
        max_bytes=limits.max_bytes,
        storage=StorageType(limits.storage),
    )


class LogKeeper:
    """Makes the stream, and again where it cannot be made yet, or stores nothing.

    Several may keep one stream: one that was made anew by another counts as one that stores.
    """

    def __init__(self, client: Client, limits: LogLimits, acks: Acknowledgements) -> None:
        self._client, self._limits, self._acks = client, limits, acks
        self._is_made = True
        self._suspected_at: int | None = None
        self._failures = acks.failures()

    async def ensure(self) -> None:
        """Makes the stream, or changes it to these limits. Without JetStream, or room on its disk:
        a warning, and no log yet."""
        was_made, config, streams = self._is_made, _config(self._limits), self._streams
        try:
            try:
                await streams.add_stream(config)
            except nats.js.errors.BadRequestError:
                await streams.update_stream(config)
            self._is_made = True
        except CALL_ERRORS as error:
            self._is_made = False
            if was_made:
                log.warning("no lifecycle log stream=%s: %s", STREAM, error)
        else:
            if not was_made:
                log.info("lifecycle log again stream=%s", STREAM)

    async def look(self) -> bool:
        """Looks whether the stream is there and stores; returns whether it was made anew. Called
        every LOOK_SECONDS while there is a broker."""
        if not self._is_made:
            await self.ensure()
            return self._is_made
        if not await self._refuses():
            return False
        log.warning(
            "lifecycle log anew stream=%s: it stores nothing, as behind a full disk; what it had"
            " is gone",
            STREAM,
        )
        with suppress(*CALL_ERRORS):
            await self._streams.delete_stream(STREAM)
        self._suspected_at = None
        await self.ensure()
        return self._is_made

    async def _refuses(self) -> bool:
        """Whether the stream is gone, or had the same last event at two looks before each of which
        more events had failed. Silence is no evidence, and acknowledgements that are merely late
        come from a stream that grows."""
        before, self._failures = self._failures, self._acks.failures()
        if self._failures == before:
            return False
        try:
            last = await self._last_event()
            if self._failures.num_refused <= before.num_refused:
                return False
            suspected, self._suspected_at = self._suspected_at, last
            # Once more: another keeper may have made it anew just now.
            return suspected == last and await self._last_event() == last
        except nats.js.errors.NotFoundError:
            return True
        except CALL_ERRORS:
            self._suspected_at = None
            return False

    async def _last_event(self) -> int:
        return (await self._streams.stream_info(STREAM)).state.last_seq

    @property
    def _streams(self) -> JetStreamContext:
        return self._client.jetstream(timeout=API_SECONDS)


async def read_log(client: Client, pattern: str, max_events: int) -> tuple[RecordedMessage, ...]:
    """The first `max_events` entries on matching subjects; Unavailable when there is no log."""
    streams = client.jetstream(timeout=API_SECONDS)
    messages: list[RecordedMessage] = []
    try:
        entries = await streams.subscribe(
            pattern, stream=STREAM, ordered_consumer=True, deliver_policy=DeliverPolicy.ALL
        )
        try:
            consumer = await entries.consumer_info()
            # The broker's answer may overtake entries that it has sent already, so they count too.
            num_sent = consumer.delivered.consumer_seq if consumer.delivered else 0
            num_entries = min(num_sent + (consumer.num_pending or 0), max_events)
            while len(messages) < num_entries:
                message = await entries.next_msg(API_SECONDS)
                messages.append(_recorded(message))
                if not message.metadata.num_pending:  # the others have aged out meanwhile
                    break
            # A consumer that is not deleted lives for some seconds, and a stream allows only so
            # many.
            with suppress(nats.js.errors.NotFoundError):
                await streams.delete_consumer(STREAM, consumer.name)
        finally:
            await entries.unsubscribe()
    except CALL_ERRORS as error:
        raise Unavailable(f"the lifecycle log does not answer: {error}") from error
    return tuple(messages)


@dataclass(frozen=True, slots=True)
class LogState:
    """Whether the broker has JetStream, whether it has the stream, and its clock (seconds since
    1970; 0 where it does not say: nats-server does so since 2.10)."""

    is_enabled: bool
    has_stream: bool
    clock: float = 0.0


async def log_state(client: Client) -> LogState:
    """Asks the broker. Raises Unavailable without an answer."""
    subject = f"$JS.API.STREAM.INFO.{STREAM}"
    try:
        message = await client.request(subject, b"", timeout=STATE_SECONDS)
        answer = json.loads(message.data)
        code = int(answer.get("error", {}).get("err_code", 0))
    except nats.errors.NoRespondersError:
        return LogState(is_enabled=False, has_stream=False)
    except (*CALL_ERRORS, TimeoutError, ValueError, AttributeError) as error:
        raise Unavailable(f"the broker does not say whether it keeps a log: {error}") from error
    return LogState(code not in NO_JETSTREAM, not code, _seconds_of(str(answer.get("ts", ""))))


def _seconds_of(text: str) -> float:
    """The seconds since 1970 of a time as nats-server writes it, with nanoseconds; 0 for no
    time."""
    whole, _, fraction = text.rstrip("Z").partition(".")
    try:
        return datetime.fromisoformat(f"{whole}.{fraction[:6]:0<6}+00:00").timestamp()
    except ValueError:
        return 0.0


def _recorded(message: Msg) -> RecordedMessage:
    return RecordedMessage(message.subject, message.data, message.metadata.sequence.stream)


@dataclass(frozen=True, slots=True)
class LogFailures:
    """The events that the stream did not store, by its own fault; and those for which the broker
    knew no stream."""

    num_refused: int
    num_unheard: int


@dataclass(frozen=True, slots=True)
class _SentEvent:
    message: OutboundMessage
    at: float


class Acknowledgements:
    """The events that were sent and are not yet acknowledged: at most MAX_OUTSTANDING.

    Each has an id by which the stream detects a repetition, so they can be sent again after an
    outage.
    """

    def __init__(self, inbox: str) -> None:
        self.num_recorded = 0
        self.num_unrecorded = 0
        self._inbox = inbox
        self._num_refused, self._num_unheard = 0, 0
        self._outstanding: dict[str, _SentEvent] = {}
        self._count = 0
        self._changed = asyncio.Event()

    @property
    def pattern(self) -> str:
        return f"{self._inbox}.*"

    def failures(self) -> LogFailures:
        """So far. An event without an answer for LOOK_SECONDS counts as refused as long as there
        is none."""
        num_late = 0
        if self._outstanding:
            latest = asyncio.get_running_loop().time() - LOOK_SECONDS
            num_late = sum(event.at <= latest for event in self._outstanding.values())
        return LogFailures(self._num_refused + num_late, self._num_unheard)

    def take_outstanding(self) -> list[OutboundMessage]:
        """The events that were sent on a lost connection, oldest first: the caller sends them
        again."""
        outstanding = [event.message for event in self._outstanding.values()]
        self._outstanding.clear()
        self._changed.set()
        return outstanding

    async def room(self) -> None:
        """Waits until one more may be outstanding.

        A stream without any answer for API_SECONDS counts as dead.
        """
        while len(self._outstanding) >= MAX_OUTSTANDING:
            self._changed.clear()
            try:
                async with asyncio.timeout(API_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                num_given_up = len(self.take_outstanding())
                self.num_unrecorded += num_given_up
                self._num_refused += num_given_up

    def enter(self, message: OutboundMessage) -> tuple[str, OutboundMessage]:
        """The subject for the acknowledgement, and the message with its id."""
        self._count += 1
        message_id = message.headers.get(_MESSAGE_ID) or f"{self._inbox}.{self._count}"
        message = replace(message, headers={**message.headers, _MESSAGE_ID: message_id})
        reply = f"{self._inbox}.{self._count}"
        self._outstanding[reply] = _SentEvent(message, asyncio.get_running_loop().time())
        return reply, message

    def withdraw(self, reply: str) -> None:
        """The message was not sent."""
        self._outstanding.pop(reply, None)

    async def on_answer(self, answer: Msg) -> None:
        """Takes the stream's answer, or the broker's answer that there is no stream."""
        if self._outstanding.pop(answer.subject, None) is None:
            return
        if answer.data and b'"error"' not in answer.data:
            self.num_recorded += 1
        else:
            self.num_unrecorded += 1
            self._num_unheard += not answer.data
            self._num_refused += _is_own_fault(answer.data)
        self._changed.set()


def _is_own_fault(answer: bytes) -> bool:
    """Whether the stream says that it is to blame, and not the event, for which it has 4xx."""
    with suppress(ValueError, KeyError, TypeError):
        return int(json.loads(answer)["error"]["code"]) >= SERVER_ERROR
    return False
