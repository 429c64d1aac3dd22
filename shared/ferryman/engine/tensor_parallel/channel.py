"""The channel from rank 0 to the others: vectors one way, in one order, and answers the other.

When a rank fails, ends or is silent, all waiting calls raise RankLost, and so does `lost`, which a
worker watches so that it notices even while no step runs.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from time import monotonic

import numpy as np

from ferryman.engine.tensor_parallel.rank import Command
from ferryman.engine.tensor_parallel.rendezvous import RankLost
from ferryman.schedule.batch import Ints


class Channel:
    """Vectors to all other ranks in one order, and their answers. `lost` never has a result.

    Send from one thread; wait from any.
    """

    def __init__(
        self,
        connections: Sequence[Connection],
        silence_seconds: float,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        for connection in connections:
            _bound_sends(connection, silence_seconds)
        self._connections = connections
        self._silence_seconds = silence_seconds
        self._changed = threading.Condition()
        self._clock = clock
        self._answered = [0] * len(connections)
        self._heard_at = [clock()] * len(connections)
        self._num_told = 0
        self._is_closing = False
        self._listeners: list[threading.Thread] = []
        self.lost: Future[None] = Future()

    def start_listening(self) -> None:
        """Starts to read answers in threads; before that, `read_reply` reads them."""
        for index in range(len(self._connections)):
            name = f"rank-{index + 1}-answers"
            thread = threading.Thread(target=self._listen, args=(index,), name=name, daemon=True)
            thread.start()
            self._listeners.append(thread)

    def send(self, vector: Ints) -> SentStep:
        """Sends a vector to all ranks. Raises RankLost."""
        self.check()
        for index, connection in enumerate(self._connections):
            try:
                connection.send_bytes(np.ascontiguousarray(vector).data.cast("B"))
            except OSError as error:
                self._lose(f"rank {index + 1} is gone or silent: {error}")
        self.check()
        self._num_told += 1
        return SentStep(self, self._num_told, self._clock())

    def has_reply(self, step: SentStep) -> bool:
        """Whether `wait` returns, or raises, at once."""
        with self._changed:
            return self._is_over(step) or self._quietest(step)[0] <= 0

    def wait(self, step: SentStep) -> None:
        """Returns when all ranks have answered the vector. Raises RankLost."""
        with self._changed:
            while not self._is_over(step):
                seconds, rank = self._quietest(step)
                if seconds <= 0:
                    why = f"rank {rank} was silent for {self._silence_seconds:g} s"
                    self._lose_locked(why)
                    raise RankLost(why)
                self._changed.wait(seconds)
        self.check()

    def check(self) -> None:
        """Raises RankLost once a rank is lost."""
        if self.lost.done():
            self.lost.result()

    def close(self) -> None:
        """Orders all ranks to end; from now on no rank counts as lost."""
        with self._changed:
            self._is_closing = True
        for connection in self._connections:
            with suppress(OSError):
                connection.send_bytes(np.array([Command.CLOSE], np.int64).data.cast("B"))

    def join(self) -> None:
        """Waits until all listeners have ended, which they do when their connections close."""
        for thread in self._listeners:
            thread.join()

    def _is_over(self, step: SentStep) -> bool:
        return self.lost.done() or not self._behind(step)

    def _behind(self, step: SentStep) -> list[int]:
        return [i for i, answered in enumerate(self._answered) if answered < step.number]

    def _quietest(self, step: SentStep) -> tuple[float, int]:
        """Seconds until the first rank without an answer counts as silent, and that rank."""
        since, index = min((max(step.at, self._heard_at[i]), i) for i in self._behind(step))
        return since + self._silence_seconds - self._clock(), index + 1

    def _listen(self, index: int) -> None:
        while True:
            try:
                read_reply(self._connections[index], index + 1)
            except RankLost as error:
                self._lose(str(error))
                return
            with self._changed:
                self._answered[index] += 1
                self._heard_at[index] = self._clock()
                self._changed.notify_all()

    def _lose(self, why: str) -> None:
        with self._changed:
            self._lose_locked(why)

    def _lose_locked(self, why: str) -> None:
        if not (self._is_closing or self.lost.done()):
            self.lost.set_exception(RankLost(why))
        self._changed.notify_all()


def _bound_sends(connection: Connection, seconds: float) -> None:
    """Limits sends: a vector that a stopped process does not read, and that the socket cannot hold,
    is an OSError after `seconds`; otherwise a send could wait for ever."""
    whole, part = divmod(seconds, 1.0)
    limit = struct.pack("ll", int(whole), int(part * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def read_reply(connection: Connection, rank: int) -> None:
    """Waits for the rank's next answer. Raises RankLost when it failed or ended."""
    try:
        answer = json.loads(connection.recv_bytes())
    except (EOFError, OSError):
        raise RankLost(f"rank {rank} ended") from None
    if "failed" in answer:
        raise RankLost(f"rank {rank} failed: {answer['failed']}")


@dataclass(frozen=True, slots=True)
class SentStep:
    """The `number`-th vector of the channel, sent at time `at`."""

    channel: Channel
    number: int
    at: float

    def has_reply(self) -> bool:
        return self.channel.has_reply(self)

    def wait(self) -> None:
        self.channel.wait(self)
