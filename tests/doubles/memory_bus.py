"""A broker in memory, for tests of one process: the guarantees of NATS, without a socket."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from ferryman.errors import DeadlineExceeded, Unavailable
from ferryman.wire.nats.bus import (
    DEADLINE_HEADER,
    MAX_PAYLOAD_BYTES,
    Answer,
    BusMessage,
    BusStatistics,
    Discoverable,
    Messages,
    RecordedMessage,
    answer_from,
    answer_to,
    check_subject,
    checked_payload,
    matches,
)
from ferryman.wire.nats.outbox import OutboundMessage, Outbox
from ferryman.wire.nats.subjects import PREFIX

_LIFE = f"{PREFIX}.*.life.>"
_MAX_RECORDED = 100_000


@dataclass
class MemoryBroker:
    """The broker that the buses of one test share. While `away` is set it does not answer."""

    away: bool = False
    log: deque[RecordedMessage] = field(default_factory=lambda: deque(maxlen=_MAX_RECORDED))
    processes: list[Discoverable] = field(default_factory=list)
    listeners: list[tuple[str, Messages]] = field(default_factory=list)
    answers: list[tuple[str, Answer]] = field(default_factory=list)
    buses: list[MemoryBus] = field(default_factory=list)
    num_missed: int = 0

    def return_(self) -> None:
        """Ends `away` and sends the messages kept meanwhile."""
        self.away = False
        for bus in self.buses:
            bus.flush()

    def deliver(self, message: OutboundMessage) -> None:
        arrived = BusMessage(message.subject, message.payload, message.headers)
        if matches(_LIFE, message.subject):
            sequence = self.log[-1].sequence + 1 if self.log else 1
            self.log.append(RecordedMessage(message.subject, message.payload, sequence))
        for pattern, messages in self.listeners:
            if matches(pattern, message.subject) and not messages.try_put(arrived):
                self.num_missed += 1


class MemoryBus:
    """A `Bus` over a `MemoryBroker`."""

    def __init__(self, broker: MemoryBroker | None = None, outbox: Outbox | None = None) -> None:
        self._broker = broker or MemoryBroker()
        self._outbox = outbox or Outbox()
        self._statistics = BusStatistics()
        self._broker.buses.append(self)

    @property
    def is_connected(self) -> bool:
        return not self._broker.away

    def publish(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        checked_payload(payload, MAX_PAYLOAD_BYTES)
        self._outbox.keep(OutboundMessage(check_subject(subject), payload, headers or {}))
        self.flush()

    def offer(self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None) -> None:
        checked_payload(payload, MAX_PAYLOAD_BYTES)
        self._outbox.offer(OutboundMessage(check_subject(subject), payload, headers or {}))
        self.flush()

    def flush(self) -> None:
        while self.is_connected and (message := self._outbox.take()):
            self._broker.deliver(message)
            sent, recorded = self._statistics.num_sent, self._statistics.num_recorded
            recorded += matches(_LIFE, message.subject)
            self._statistics = replace(self._statistics, num_sent=sent + 1, num_recorded=recorded)

    @asynccontextmanager
    async def subscribed(self, pattern: str) -> AsyncIterator[Messages]:
        entry = (pattern, Messages())
        self._broker.listeners.append(entry)
        try:
            yield entry[1]
        finally:
            self._broker.listeners.remove(entry)

    @asynccontextmanager
    async def answering(self, pattern: str, answer: Answer) -> AsyncIterator[None]:
        entry = (pattern, answer)
        self._broker.answers.append(entry)
        try:
            yield
        finally:
            self._broker.answers.remove(entry)

    async def request(self, subject: str, payload: bytes, *, timeout_seconds: float) -> bytes:
        if not self.is_connected:
            raise Unavailable("the broker is away")
        headers = {DEADLINE_HEADER: str(round(timeout_seconds * 1000))}
        message = BusMessage(check_subject(subject), payload, headers)
        for pattern, answer in self._broker.answers:
            if matches(pattern, subject):
                try:
                    async with asyncio.timeout(timeout_seconds):
                        return answer_from(*await answer_to(message, answer))
                except TimeoutError:
                    raise DeadlineExceeded(f"no answer on {subject} in time") from None
        raise Unavailable(f"nobody answers on {subject}")

    async def history(self, pattern: str, *, max_events: int) -> tuple[RecordedMessage, ...]:
        if not self.is_connected:
            raise Unavailable("the lifecycle log is away")
        found = [entry for entry in self._broker.log if matches(pattern, entry.subject)]
        return tuple(found[:max_events])

    @asynccontextmanager
    async def discoverable(self, process: Discoverable) -> AsyncIterator[None]:
        self._broker.processes.append(process)
        try:
            yield
        finally:
            self._broker.processes.remove(process)

    def statistics(self) -> BusStatistics:
        return replace(
            self._statistics,
            num_waiting=len(self._outbox),
            num_refused=self._outbox.num_refused,
            num_dropped=self._outbox.num_dropped,
            num_missed=self._broker.num_missed,
        )
