"""A clock that nobody waits for: what shall happen, in the order of its time."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

Action = Callable[[], None]


class VirtualClock:
    """Seconds from 0 on. Actions at one time run in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._waiting: list[tuple[float, int, Action]] = []
        self._orders = count()

    def at(self, seconds: float, action: Action) -> None:
        """Runs `action` at that time, or now when that is over."""
        heappush(self._waiting, (max(seconds, self.now), next(self._orders), action))

    def after(self, seconds: float, action: Action) -> None:
        self.at(self.now + seconds, action)

    def run(self) -> None:
        """Until nothing is to happen any more."""
        while self._waiting:
            self.now, _, action = heappop(self._waiting)
            action()
