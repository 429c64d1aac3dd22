"""The channel from rank 0 to the others: vectors one way, in one order, and answers the other.

A rank that fails, ends or falls silent is RankLost for everybody who waits, and for `lost`, which
a worker watches so that it notices while nothing runs.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

from ferryman.engine.rank import Command
from ferryman.engine.rank_group import RankLost
from ferryman.schedule.batch import Ints


class Channel:
    """Vectors to all other ranks in one order, and their answers. `lost` never has a result.

    Tell from one thread; wait from any.
    """

    def __init__(self, connections: Sequence[Connection], silence_seconds: float) -> None:
        self._connections = connections
        self._silence_seconds = silence_seconds
        self._changed = threading.Condition()
        self._answered = [0] * len(connections)
        self._num_told = 0
        self._is_closing = False
        self._listeners: list[threading.Thread] = []
        self.lost: Future[None] = Future()

    def listen(self) -> None:
        """From now on answers are heard; until then they are read by `answer_of`."""
        for index in range(len(self._connections)):
            name = f"rank-{index + 1}-answers"
            thread = threading.Thread(target=self._listen, args=(index,), name=name, daemon=True)
            thread.start()
            self._listeners.append(thread)

    def tell(self, vector: Ints) -> int:
        """Sends a vector to all; its number, from 1 on. Raises RankLost."""
        self.check()
        for index, connection in enumerate(self._connections):
            try:
                connection.send_bytes(np.ascontiguousarray(vector).data.cast("B"))
            except OSError as error:
                self._lose(f"rank {index + 1} is gone: {error}")
        self.check()
        self._num_told += 1
        return self._num_told

    def is_answered(self, number: int) -> bool:
        """Whether `wait` returns, or raises, at once."""
        with self._changed:
            return self.lost.done() or min(self._answered) >= number

    def wait(self, number: int) -> None:
        """Returns when all have done what was told as `number`. Raises RankLost."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_over(number), self._silence_seconds):
                silent = [i + 1 for i, done in enumerate(self._answered) if done < number]
                self._lose_locked(f"rank {silent[0]} was silent for {self._silence_seconds:g} s")
        self.check()

    def check(self) -> None:
        """Raises RankLost once a rank is lost."""
        if self.lost.done():
            self.lost.result()

    def close(self) -> None:
        """Lets all ranks end; nobody is lost any more."""
        with self._changed:
            self._is_closing = True
        for connection in self._connections:
            with suppress(OSError):
                connection.send_bytes(np.array([Command.CLOSE], np.int64).data.cast("B"))

    def join(self) -> None:
        """Waits until nobody reads from the connections: when their other ends have closed."""
        for thread in self._listeners:
            thread.join()

    def _is_over(self, number: int) -> bool:
        return self.lost.done() or min(self._answered) >= number

    def _listen(self, index: int) -> None:
        while True:
            try:
                answer_of(self._connections[index], index + 1)
            except RankLost as error:
                self._lose(str(error))
                return
            with self._changed:
                self._answered[index] += 1
                self._changed.notify_all()

    def _lose(self, why: str) -> None:
        with self._changed:
            self._lose_locked(why)

    def _lose_locked(self, why: str) -> None:
        if not (self._is_closing or self.lost.done()):
            self.lost.set_exception(RankLost(why))
        self._changed.notify_all()


def answer_of(connection: Connection, rank: int) -> None:
    """Waits for the rank's next answer. Raises RankLost when it failed or ended."""
    try:
        answer = json.loads(connection.recv_bytes())
    except (EOFError, OSError):
        raise RankLost(f"rank {rank} ended") from None
    if "failed" in answer:
        raise RankLost(f"rank {rank} failed: {answer['failed']}")


@dataclass(frozen=True, slots=True)
class ToldStep:
    """A step that the channel carried."""

    channel: Channel
    number: int

    def is_answered(self) -> bool:
        return self.channel.is_answered(self.number)

    def wait(self) -> None:
        self.channel.wait(self.number)
