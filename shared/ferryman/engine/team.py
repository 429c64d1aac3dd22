"""Rank 0's end of its worker's other ranks: child processes, told of every step.

A rank that fails, ends or falls silent is RankLost for everybody who waits, and for `lost`, which
a worker watches so that it notices while nothing runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from torch import Tensor

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.shards import recut
from ferryman.engine.copy_side import CopySide, Fence
from ferryman.engine.others import Sizes
from ferryman.engine.packing import PackedStep
from ferryman.engine.rank import Command, RankOrders
from ferryman.engine.rank_group import RankLost, meet
from ferryman.engine.sharded_transfer import ShardedTransfer
from ferryman.engine.shared_slabs import map_shared
from ferryman.engine.slabs import Slabs
from ferryman.engine.transfer import Transfer
from ferryman.model.ranks import Group
from ferryman.schedule.batch import Ints

CLOSE_SECONDS = 5.0
STDERR = 2


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
        self.lost: Future[None] = Future()

    def listen(self) -> None:
        """From now on answers are heard; until then they are read by `answer_of`."""
        for index in range(len(self._connections)):
            name = f"rank-{index + 1}-answers"
            threading.Thread(target=self._listen, args=(index,), name=name, daemon=True).start()

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


@dataclass(frozen=True, slots=True)
class Team:
    """The other ranks once they have their slabs: `shares[i][kind]` are rank i + 1's."""

    group: Group
    channel: Channel
    whole: StateManifest
    of_rank: StateManifest
    shares: Sequence[Mapping[Kind, Tensor]]

    def tell(self, packed: PackedStep, fence: Fence) -> ToldStep:
        fence.finish()  # what other ranks read must have arrived: fences are of this device
        vector = np.concatenate([[Command.RUN], packed.as_vector()])
        return ToldStep(self.channel, self.channel.tell(vector))

    def transfer_of(self, own: Slabs, side: CopySide) -> Transfer:
        recuts = {
            kind: recut(self.whole.layout(kind), self.of_rank.layout(kind), self.group.num_ranks)
            for kind in self.whole.kinds
        }
        return ShardedTransfer(recuts, [own.tensors, *self.shares])


class Recruits:
    """The other ranks while they load their share of the model."""

    def __init__(self, group: Group, connections: Sequence[Connection], orders: RankOrders) -> None:
        self.group = group
        self._connections = connections
        self._orders = orders
        self.channel = Channel(connections, orders.silence_seconds)
        self.lost = self.channel.lost

    def allocate(self, whole: StateManifest, of_rank: StateManifest, sizes: Sizes) -> Team:
        """Has all of them make their slabs. Raises RankLost."""
        for index, connection in enumerate(self._connections):
            answer_of(connection, index + 1)
        slots = [sizes.num_slots[kind] for kind in of_rank.kinds]
        vector = [Command.ALLOCATE, sizes.max_rows, sizes.max_len, *slots]
        self.channel.tell(np.array(vector, np.int64))
        shares = []
        for index, connection in enumerate(self._connections):
            device = replace(self._orders, rank=index + 1).torch_device
            shares.append(map_shared(of_rank, device, connection))
        self.channel.listen()
        return Team(self.group, self.channel, whole, of_rank, shares)


@contextmanager
def recruited(orders: RankOrders) -> Iterator[Recruits]:
    """The other ranks of rank 0's `orders`, as processes that end with the `with`.

    `orders.meeting` is the file's name in a folder of its own. Raises RankLost.
    """
    with TemporaryDirectory(prefix="ferryman-ranks-") as folder:
        orders = replace(orders, meeting=str(Path(folder) / orders.meeting))
        started = [_start(replace(orders, rank=rank)) for rank in range(1, orders.num_ranks)]
        connections = [connection for _, connection in started]
        try:
            for index, connection in enumerate(connections):
                answer_of(connection, index + 1)
            group = meet(orders.where, 0, orders.torch_device)
            recruits = Recruits(group, connections, orders)
            try:
                yield recruits
            finally:
                recruits.channel.close()
        finally:
            for process, connection in started:
                _end(process, connection)


def _start(orders: RankOrders) -> tuple[subprocess.Popen[bytes], Connection]:
    """One rank, which has its orders. What it prints goes where this process's errors go."""
    own, theirs = Pipe()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "ferryman.engine.rank", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=STDERR,
            pass_fds=(theirs.fileno(),),
        )
    own.send_bytes(orders.to_json())
    return process, own


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    """Closing the connection ends a rank that was not told to; one that is stuck is killed."""
    try:
        process.wait(CLOSE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    finally:
        connection.close()
