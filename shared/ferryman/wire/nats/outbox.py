"""Messages that wait to be published: two bounded lanes, so that publishing never waits for a
broker.

publish    kept in order until sent; refused with QueueFull when the lane is full
offer      the newest matter most: a full lane drops its oldest, and counts it
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from ferryman.errors import QueueFull

MAX_KEPT = 8192
MAX_OFFERED = 1024


@dataclass(frozen=True, slots=True)
class OutboundMessage:
    """One message to be sent."""

    subject: str
    payload: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


class Outbox:
    """The two lanes. Kept messages go before offered ones."""

    def __init__(self, max_kept: int = MAX_KEPT, max_offered: int = MAX_OFFERED) -> None:
        self._max_kept, self._max_offered = max_kept, max_offered
        self._kept: deque[OutboundMessage] = deque()
        self._offered: deque[OutboundMessage] = deque()
        self.num_refused = 0
        self.num_dropped = 0

    def __len__(self) -> int:
        return len(self._kept) + len(self._offered)

    def keep(self, message: OutboundMessage) -> None:
        if len(self._kept) >= self._max_kept:
            self.num_refused += 1
            raise QueueFull(f"{self._max_kept} messages wait for the broker")
        self._kept.append(message)

    def offer(self, message: OutboundMessage) -> None:
        if len(self._offered) >= self._max_offered:
            self._offered.popleft()
            self.num_dropped += 1
        self._offered.append(message)

    def take(self) -> OutboundMessage | None:
        """The next message to send. A caller that cannot send it gives it back."""
        if self._kept:
            return self._kept.popleft()
        return self._offered.popleft() if self._offered else None

    def give_back(self, message: OutboundMessage) -> None:
        """The message was not sent: it is the next again."""
        self._kept.appendleft(message)
