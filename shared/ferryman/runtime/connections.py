"""Limits on the connections of an HTTP server: in all, and from one address."""

from __future__ import annotations

import logging
import resource
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)

# Files that a process needs in addition to its clients' connections.
SPARE_FILES = 256
LOG_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of one server: the connections it keeps, and the seconds it waits for the head and for
    the whole body of a request. If a request is answered before its body has arrived, at most
    `drain_bytes` of the rest are read and dropped, for at most `drain_seconds`."""

    max_connections: int = 8192
    max_per_address: int = 1024
    header_seconds: float = 10.0
    body_seconds: float = 60.0
    header_bytes: int = 64 << 10
    drain_bytes: int = 16 << 20
    drain_seconds: float = 5.0


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


class ConnectionTable:
    """The connections of one server, by address, and counts of refusals."""

    def __init__(
        self, limits: ConnectionLimits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limits, self._clock = limits, clock
        self._max_connections = within_file_limit(limits.max_connections)
        self._by_address: Counter[str] = Counter()
        self._num_connections = 0
        self._refused: Counter[str] = Counter()
        self._logged = float("-inf")

    def __len__(self) -> int:
        return self._num_connections

    def enter(self, address: str) -> bool:
        """Counts one more connection from `address`; False if it is refused.

        The caller calls `leave` for each one that was counted.
        """
        if self._num_connections >= self._max_connections:
            self.refuse("too many connections")
            return False
        if self._by_address[address] >= self.limits.max_per_address:
            self.refuse(f"too many connections from {address}")
            return False
        self._by_address[address] += 1
        self._num_connections += 1
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
