"""Rank 0's end of its worker's other ranks: child processes, told of every step."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from ferryman.engine.rank_channel import Channel, ToldStep, answer_of
from ferryman.engine.rank_group import meet
from ferryman.engine.sharded_transfer import ShardedTransfer
from ferryman.engine.shared_slabs import map_shared
from ferryman.engine.slabs import Slabs
from ferryman.engine.transfer import Transfer
from ferryman.model.ranks import Group

CLOSE_SECONDS = 5.0
STDERR = 2


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
        return self.channel.tell(vector)

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
        started = [start_rank(replace(orders, rank=rank)) for rank in range(1, orders.num_ranks)]
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
                for process, _ in started:
                    _end(process)
                recruits.channel.join()
        finally:
            for process, connection in started:
                connection.close()
                _end(process)


def start_rank(orders: RankOrders) -> tuple[subprocess.Popen[bytes], Connection]:
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


def _end(process: subprocess.Popen[bytes]) -> None:
    """Waits for the end of a rank that was told to, or whose connection closed; or kills it."""
    try:
        process.wait(CLOSE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
