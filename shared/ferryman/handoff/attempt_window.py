"""The signed attempts of routers that may still begin at a decode worker.

An attempt begins once, and within the lifetime that its router gave it. No two clocks are compared
for that: a router counts its attempts, so one is too late when a later one has been here for longer
than its lifetime. Until then its number is remembered if it has begun.

    serial   1   2   3   4          attempt 4 was seen 20 s ago: 1, 2 and 3 were ordered before
    seen     -  yes  -  20 s ago    a lifetime of 10 s is over for 1 and 3; with 60 s they may come
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from operator import itemgetter

from ferryman.errors import Stale

MAX_ROUTERS = 1024
# For each router: beyond these bounds an attempt is called late before it is.
MAX_MARKS, MAX_BEGUN = 4096, 65_536
# Marks that are nearer to each other than this count as one.
MARK_SECONDS = 1.0


class RouterWindow:
    """The attempts of one router, by the serial numbers that it gave them."""

    def __init__(self) -> None:
        # Ascending in both: attempts up to `serial` had been ordered at `seen_at`.
        self._marks: list[tuple[float, int]] = []
        self._begun: OrderedDict[int, float] = OrderedDict()
        self._oldest = 0

    def check(self, serial: int, lifetime_seconds: float, now: float) -> None:
        """Raises Stale for an attempt that has begun, or whose lifetime is over."""
        if serial in self._begun:
            raise Stale("this attempt has been here before")
        if serial <= self._oldest or self._is_late(serial, lifetime_seconds, now):
            raise Stale("this attempt comes after its time")

    def _is_late(self, serial: int, lifetime_seconds: float, now: float) -> bool:
        place = bisect_left(self._marks, serial, key=itemgetter(1))
        if place == len(self._marks):
            return False
        return now - self._marks[place][0] > lifetime_seconds + MARK_SECONDS

    def begin(self, serial: int, lifetime_seconds: float, now: float) -> None:
        """The attempt begins: it may not begin again."""
        self._begun[serial] = now + lifetime_seconds + 2 * MARK_SECONDS
        self._mark(serial, now)
        self._forget(now)

    def _mark(self, serial: int, now: float) -> None:
        latest = self._marks[-1][1] if self._marks else 0
        if serial <= latest:
            return
        if self._marks and now - self._marks[-1][0] < MARK_SECONDS:
            self._marks[-1] = self._marks[-1][0], serial
        else:
            self._marks.append((now, serial))
        if len(self._marks) > MAX_MARKS:
            self._oldest = self._marks.pop(0)[1]

    def _forget(self, now: float) -> None:
        """Forgets attempts that are late by the marks: these refuse them."""
        while self._begun:
            serial, end = next(iter(self._begun.items()))
            if now < end and len(self._begun) <= MAX_BEGUN:
                return
            if now < end:
                self._oldest = max(self._oldest, serial)
            del self._begun[serial]


class AttemptWindows:
    """The windows of all routers, the latest MAX_ROUTERS of them. Attempts that are not signed have
    none."""

    def __init__(self) -> None:
        self._windows: OrderedDict[str, RouterWindow] = OrderedDict()

    def check(self, router_id: str, serial: int, lifetime_seconds: float, now: float) -> None:
        """Raises Stale as the router's window does."""
        if serial and (window := self._windows.get(router_id)) is not None:
            window.check(serial, lifetime_seconds, now)

    def begin_once(self, router_id: str, serial: int, lifetime_seconds: float, now: float) -> None:
        """An attempt of that router begins. Raises Stale as its window does."""
        self.check(router_id, serial, lifetime_seconds, now)
        self.begin(router_id, serial, lifetime_seconds, now)

    def begin(self, router_id: str, serial: int, lifetime_seconds: float, now: float) -> None:
        """An attempt of that router begins."""
        if not serial:
            return
        window = self._windows.setdefault(router_id, RouterWindow())
        self._windows.move_to_end(router_id)
        window.begin(serial, lifetime_seconds, now)
        if len(self._windows) > MAX_ROUTERS:
            self._windows.popitem(last=False)
