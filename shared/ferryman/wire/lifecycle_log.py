"""The lifecycle log: a JetStream stream that keeps the events of the last hour.

Publishers do not wait for its acknowledgements; a window bounds how many are outstanding. What an
outage left without one is sent again, so a listener may see an event twice; the log has it once.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from typing import Literal

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import DeliverPolicy, DiscardPolicy, RetentionPolicy, StorageType, StreamConfig

from ferryman.errors import Unavailable
from ferryman.wire.bus import Recorded
from ferryman.wire.outbox import Outgoing
from ferryman.wire.subjects import PREFIX

log = logging.getLogger(__name__)

STREAM = "LIFECYCLE"
ALL_LIFE = f"{PREFIX}.*.life.>"
API_SECONDS = 2.0
MAX_OUTSTANDING = 512
_MESSAGE_ID = "Nats-Msg-Id"


@dataclass(frozen=True, slots=True)
class LogLimits:
    """How long and how much the stream keeps; the oldest entries go first."""

    max_age_seconds: float = 3600.0
    max_bytes: int = 64 << 20
    storage: Literal["file", "memory"] = "file"


async def ensure_stream(client: Client, limits: LogLimits) -> None:
    """Make the stream, or bring it to these limits. Without JetStream: a warning, and no log."""
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


async def read_log(client: Client, pattern: str, max_events: int) -> tuple[Recorded, ...]:
    """The first `max_events` entries on matching subjects; Unavailable when there is no log."""
    streams = client.jetstream(timeout=API_SECONDS)
    found: list[Recorded] = []
    try:
        entries = await streams.subscribe(
            pattern, stream=STREAM, ordered_consumer=True, deliver_policy=DeliverPolicy.ALL
        )
        try:
            waiting = (await entries.consumer_info()).num_pending or 0
            while waiting + entries.pending_msgs and len(found) < max_events:
                message = await entries.next_msg(API_SECONDS)
                waiting = message.metadata.num_pending
                found.append(_recorded(message))
                if not waiting:
                    break
        finally:
            await entries.unsubscribe()
    except (nats.errors.Error, TimeoutError) as error:
        raise Unavailable(f"the lifecycle log does not answer: {error}") from error
    return tuple(found)


def _recorded(message: Msg) -> Recorded:
    return Recorded(message.subject, message.data, message.metadata.sequence.stream)


class Acknowledgements:
    """The events that were sent and not yet acknowledged: at most MAX_OUTSTANDING.

    Each has an id by which the stream knows a repetition, so after an outage they are sent again.
    """

    def __init__(self, inbox: str) -> None:
        self.num_recorded = 0
        self.num_unrecorded = 0
        self._inbox = inbox
        self._outstanding: dict[str, Outgoing] = {}
        self._count = 0
        self._changed = asyncio.Event()

    @property
    def pattern(self) -> str:
        return f"{self._inbox}.*"

    def take_outstanding(self) -> list[Outgoing]:
        """What was sent on a connection that is no more, oldest first: to be sent again."""
        outstanding = list(self._outstanding.values())
        self._outstanding.clear()
        self._changed.set()
        return outstanding

    async def room(self) -> None:
        """Wait until one more may be outstanding.

        A stream that takes API_SECONDS to answer anything at all is taken for dead.
        """
        while len(self._outstanding) >= MAX_OUTSTANDING:
            self._changed.clear()
            try:
                async with asyncio.timeout(API_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                self.num_unrecorded += len(self.take_outstanding())

    def enter(self, message: Outgoing) -> tuple[str, Outgoing]:
        """Where the answer shall go, and the message with its id."""
        self._count += 1
        message_id = message.headers.get(_MESSAGE_ID) or f"{self._inbox}.{self._count}"
        message = replace(message, headers={**message.headers, _MESSAGE_ID: message_id})
        reply = f"{self._inbox}.{self._count}"
        self._outstanding[reply] = message
        return reply, message

    def withdraw(self, reply: str) -> None:
        """It was not sent after all."""
        self._outstanding.pop(reply, None)

    async def on_answer(self, answer: Msg) -> None:
        """The stream's answer, or the broker's word that there is no stream."""
        if self._outstanding.pop(answer.subject, None) is None:
            return
        if answer.data and b'"error"' not in answer.data:
            self.num_recorded += 1
        else:
            self.num_unrecorded += 1
        self._changed.set()
