"""A bounded queue of spans, and the thread that sends them in batches.

`put` never waits. Spans for which there is no room, and those of a batch that the collector did not
take, are lost and counted: a collector that is away costs traces, and no token waits for it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ferryman.runtime.spans.span import Span

log = logging.getLogger(__name__)

MAX_QUEUED = 4096
MAX_BATCH = 512
BATCH_SECONDS = 1.0

SendSpans = Callable[[Sequence[Span]], bool]
"""Sends spans, and returns whether the collector took them. It may wait, within bounds."""


@dataclass(frozen=True, slots=True)
class SpanStatistics:
    """Spans that the collector took, spans that were lost, and those that wait."""

    num_sent: int
    num_lost: int
    num_queued: int


class SpanQueue:
    """Spans on their way to a collector. One thread puts them in, and its own sends them."""

    def __init__(
        self, send: SendSpans, *, max_queued: int = MAX_QUEUED, patience: float = BATCH_SECONDS
    ) -> None:
        self._send, self._max_queued, self._patience = send, max_queued, patience
        self._queued: deque[Span] = deque()
        self._wake, self._is_closing = threading.Event(), False
        self._num_sent, self._num_lost = 0, 0
        self._num_refused = 0  # written by the caller's thread alone
        self._is_away = False
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def put(self, span: Span) -> None:
        """Takes a span for the next batch, or loses and counts it."""
        if len(self._queued) >= self._max_queued:
            self._num_refused += 1
            return
        self._queued.append(span)
        if len(self._queued) >= MAX_BATCH:
            self._wake.set()

    def statistics(self) -> SpanStatistics:
        return SpanStatistics(self._num_sent, self._num_lost + self._num_refused, len(self._queued))

    def close(self, seconds: float) -> None:
        """Sends what waits, for at most `seconds`; the rest is lost with the process."""
        self._is_closing = True
        self._wake.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        while not self._is_closing:
            self._wake.wait(self._patience)
            self._wake.clear()
            self._send_all()
        self._send_all()

    def _send_all(self) -> None:
        while batch := [self._queued.popleft() for _ in range(min(MAX_BATCH, len(self._queued)))]:
            if self._try_send(batch):
                self._num_sent += len(batch)
                self._is_away = False
                continue
            self._num_lost += len(batch)
            if not self._is_away:  # said once, until it is back
                log.warning("the collector of spans does not take them; lost=%d", self._num_lost)
            self._is_away = True

    def _try_send(self, batch: Sequence[Span]) -> bool:
        try:
            return self._send(batch)
        except Exception as error:  # any error of a library on this thread loses spans, no more
            log.debug("spans were not sent: %r", error)
            return False
