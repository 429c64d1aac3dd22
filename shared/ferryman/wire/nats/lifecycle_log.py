"""The lifecycle log: a JetStream stream that keeps the events of the last hour.

Publishers do not wait for its acknowledgements; a window bounds how many are outstanding. After an
outage, events without one are sent again, so a listener may see an event twice; the log has it
once.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import DeliverPolicy, DiscardPolicy, RetentionPolicy, StorageType, StreamConfig

from ferryman.errors import Unavailable
from ferryman.wire.nats.bus import RecordedMessage
from ferryman.wire.nats.outbox import OutboundMessage
from ferryman.wire.nats.subjects import PREFIX

log = logging.getLogger(__name__)

STREAM = "LIFECYCLE"
ALL_LIFE = f"{PREFIX}.*.life.>"
API_SECONDS = 2.0
MAX_OUTSTANDING = 512
_MESSAGE_ID = "Nats-Msg-Id"


@dataclass(frozen=True, slots=True)
class LogLimits:
    """The age and the size that the stream keeps; the oldest entries go first."""

    max_age_seconds: float = 3600.0
    max_bytes: int = 64 << 20
    storage: Literal["file", "memory"] = "file"


async def ensure_stream(client: Client, limits: LogLimits) -> None:
    """Makes the stream, or changes it to these limits. Without JetStream: a warning, and no log."""
    config = StreamConfig(
        name=STREAM,
        subjects=[ALL_LIFE],
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.OLD,
        max_age=limits.max_age_seconds,
        max_bytes=limits.max_bytes,
        storage=StorageType(limits.storage),
    )
    streams = client.jetstream(timeout=API_SECONDS)
    try:
        try:
            await streams.add_stream(config)
        except nats.js.errors.BadRequestError:
            await streams.update_stream(config)
    except (nats.errors.Error, TimeoutError) as error:
        log.warning("no lifecycle log stream=%s: %s", STREAM, error)


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
    except (nats.errors.Error, TimeoutError) as error:
        raise Unavailable(f"the lifecycle log does not answer: {error}") from error
    return tuple(messages)


def _recorded(message: Msg) -> RecordedMessage:
    return RecordedMessage(message.subject, message.data, message.metadata.sequence.stream)


class Acknowledgements:
    """The events that were sent and are not yet acknowledged: at most MAX_OUTSTANDING.

    Each has an id by which the stream detects a repetition, so they can be sent again after an
    outage.
    """

    def __init__(self, inbox: str) -> None:
        self.num_recorded = 0
        self.num_unrecorded = 0
        self._inbox = inbox
        self._outstanding: dict[str, OutboundMessage] = {}
        self._count = 0
        self._changed = asyncio.Event()

    @property
    def pattern(self) -> str:
        return f"{self._inbox}.*"

    def take_outstanding(self) -> list[OutboundMessage]:
        """The events that were sent on a lost connection, oldest first: the caller sends them
        again."""
        outstanding = list(self._outstanding.values())
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
                self.num_unrecorded += len(self.take_outstanding())

    def enter(self, message: OutboundMessage) -> tuple[str, OutboundMessage]:
        """The subject for the acknowledgement, and the message with its id."""
        self._count += 1
        message_id = message.headers.get(_MESSAGE_ID) or f"{self._inbox}.{self._count}"
        message = replace(message, headers={**message.headers, _MESSAGE_ID: message_id})
        reply = f"{self._inbox}.{self._count}"
        self._outstanding[reply] = message
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
        self._changed.set()
