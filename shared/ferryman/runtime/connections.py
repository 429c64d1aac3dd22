"""Limits on the connections of an HTTP server: in all, and from one address.

An address may be a proxy's, with many clients behind it. So where it has no place left, a
connection on which no request has begun for a second gives way to the next one.
"""

from __future__ import annotations

import logging
import resource
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

log = logging.getLogger(__name__)

# Files that a process needs in addition to its clients' connections.
SPARE_FILES = 256
LOG_SECONDS = 1.0
HALF_OPEN_SECONDS = 1.0
MAX_FRAMING = 8  # a chunk of one byte has five of framing


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of one server: the connections it keeps, and the seconds it waits for the head and for
    the whole body of a request.

    A body may come with `framing_bytes` and MAX_FRAMING times its own size of chunk sizes,
    extensions and trailers. If a request is answered before its body has arrived, at most
    `drain_bytes` of the rest are read and dropped, for at most `drain_seconds`.
    """

    max_connections: int = 8192
    max_per_address: int = 1024
    header_seconds: float = 10.0
    body_seconds: float = 60.0
    header_bytes: int = 64 << 10
    framing_bytes: int = 64 << 10
    drain_bytes: int = 16 << 20
    drain_seconds: float = 5.0

    def most_framing(self, num_content: int) -> int:
        """The most bytes beside so many of a body."""
        return self.framing_bytes + MAX_FRAMING * num_content


def raise_file_limit() -> None:
    """Raises this process's limit of open files to the allowed maximum: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def within_file_limit(max_connections: int) -> int:
    """`max_connections`, or fewer if this process cannot open as many files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return max_connections
    return max(1, min(max_connections, soft - SPARE_FILES))


@dataclass(frozen=True, slots=True)
class _HalfOpen:
    """A connection without a request, since when, and the way to end it."""

    since: float
    give_way: Callable[[], None]


class ConnectionTable:
    """The connections of one server, by address, and counts of refusals."""

    def __init__(
        self, limits: ConnectionLimits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limits, self._clock = limits, clock
        self._max_connections = within_file_limit(limits.max_connections)
        self._by_address: Counter[str] = Counter()
        self._num_connections = 0
        self._half_open: dict[str, dict[object, _HalfOpen]] = {}
        self._refused: Counter[str] = Counter()
        self._logged = float("-inf")

    def __len__(self) -> int:
        return self._num_connections

    def enter(self, address: str) -> bool:
        """Counts one more connection from `address`; False if it is refused.

        The caller calls `leave` for each one that was counted.
        """
        while self._num_connections >= self._max_connections:
            most = max(self._half_open.values(), key=len, default={})
            if not self._gives_way(most):
                self.refuse("too many connections")
                return False
        while self._by_address[address] >= self.limits.max_per_address:
            if not self._gives_way(self._half_open.get(address, {})):
                self.refuse(f"too many connections from {address}")
                return False
        self._by_address[address] += 1
        self._num_connections += 1
        return True

    def wait(self, connection: object, address: str, give_way: Callable[[], None]) -> None:
        """No request has begun on a connection that was counted: `give_way` may be called, which
        closes it and calls `leave`."""
        of_address = self._half_open.setdefault(address, {})
        of_address[connection] = _HalfOpen(self._clock(), give_way)

    def begin(self, connection: object, address: str) -> None:
        """A request has begun on it, or it is closed."""
        of_address = self._half_open.get(address, {})
        of_address.pop(connection, None)
        if not of_address:
            self._half_open.pop(address, None)

    def _gives_way(self, half_open: Mapping[object, _HalfOpen]) -> bool:
        """Whether the oldest of these has made room."""
        oldest = next(iter(half_open.values()), None)
        if oldest is None or self._clock() - oldest.since < HALF_OPEN_SECONDS:
            return False
        self.refuse("it began no request, and others had no place")
        oldest.give_way()
        return True

    def leave(self, address: str) -> None:
        """Removes a connection that was counted."""
        self._num_connections -= 1
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]

    def refuse(self, why: str) -> None:
        """Logs refusals at most once a second, with their number since the last line.

        Clients must not be able to fill a disk.
        """
        self._refused[why] += 1
        if self._clock() - self._logged < LOG_SECONDS:
            return
        self._logged = self._clock()
        most, _ = self._refused.most_common(1)[0]
        log.warning("connections refused num=%d, most: %s", self._refused.total(), most)
        self._refused.clear()
