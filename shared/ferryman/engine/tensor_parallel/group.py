"""Rank 0's side of its worker's other ranks: child processes that get every step."""

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
from ferryman.cache.shards import reshard
from ferryman.engine.forward.packed_step import PackedStep
from ferryman.engine.memory.copy_stream import CopyFence
from ferryman.engine.memory.slabs import Slabs
from ferryman.engine.memory.transfer import Transfer
from ferryman.engine.tensor_parallel.channel import Channel, SentStep, read_reply
from ferryman.engine.tensor_parallel.rank import Command, RankOrders
from ferryman.engine.tensor_parallel.rendezvous import join
from ferryman.engine.tensor_parallel.shared_slabs import ShardedTransfer, map_shared
from ferryman.model.shapes.ranks import Group

CLOSE_SECONDS = 5.0
STDERR = 2


@dataclass(frozen=True, slots=True)
class SlabSizes:
    """The sizes that every rank allocates: slots of each kind, rows and tokens of the history, and
    the most tokens of a graph (0: no graphs)."""

    num_slots: Mapping[Kind, int]
    max_rows: int
    max_len: int
    graph_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TpGroup:
    """The other ranks with their slabs: `shares[i][kind]` belongs to rank i + 1."""

    group: Group
    channel: Channel
    whole: StateManifest
    of_rank: StateManifest
    shares: Sequence[Mapping[Kind, Tensor]]

    def send(self, packed: PackedStep, fence: CopyFence) -> SentStep:
        """Makes all ranks run a step whose loads end with `fence`. Raises RankLost."""
        # loads must have arrived before other ranks read them: a fence only orders this device
        fence.finish()
        vector = np.concatenate([[Command.RUN], packed.as_vector()])
        return self.channel.send(vector)

    def transfer_of(self, slabs: Slabs) -> Transfer:
        """The slots of the whole model; `slabs` holds rank 0's share."""
        recuts = {
            kind: reshard(self.whole.layout(kind), self.of_rank.layout(kind), self.group.num_ranks)
            for kind in self.whole.kinds
        }
        return ShardedTransfer(recuts, [slabs.tensors, *self.shares])


class TpStartup:
    """The other ranks while they load their share of the model. `lost` fails when one is gone."""

    def __init__(self, group: Group, connections: Sequence[Connection], orders: RankOrders) -> None:
        self.group = group
        self._connections = connections
        self._orders = orders
        self.channel = Channel(connections, orders.silence_seconds)
        self.lost = self.channel.lost

    def allocate(self, whole: StateManifest, of_rank: StateManifest, sizes: SlabSizes) -> TpGroup:
        """Makes all ranks allocate their slabs. Raises RankLost."""
        for index, connection in enumerate(self._connections):
            read_reply(connection, index + 1)
        slots = [sizes.num_slots[kind] for kind in of_rank.kinds]
        vector = [Command.ALLOCATE, sizes.max_rows, sizes.max_len, sizes.graph_tokens, *slots]
        self.channel.send(np.array(vector, np.int64))
        shares = []
        for index, connection in enumerate(self._connections):
            device = replace(self._orders, rank=index + 1).torch_device
            shares.append(map_shared(of_rank, device, connection))
        self.channel.start_listening()
        return TpGroup(self.group, self.channel, whole, of_rank, shares)


@contextmanager
def start_ranks(orders: RankOrders) -> Iterator[TpStartup]:
    """The other ranks of rank 0's `orders`, as processes that end with the `with`.

    `orders.meeting` is the file's name in a folder of its own. Raises RankLost.
    """
    with TemporaryDirectory(prefix="ferryman-ranks-") as folder:
        orders = replace(orders, meeting=str(Path(folder) / orders.meeting))
        started = [start_rank(replace(orders, rank=rank)) for rank in range(1, orders.num_ranks)]
        connections = [connection for _, connection in started]
        try:
            for index, connection in enumerate(connections):
                read_reply(connection, index + 1)
            group = join(orders.where, 0, orders.torch_device)
            startup = TpStartup(group, connections, orders)
            try:
                yield startup
            finally:
                startup.channel.close()
                for process, _ in started:
                    _end(process)
                startup.channel.join()
        finally:
            for process, connection in started:
                connection.close()
                _end(process)


def start_rank(orders: RankOrders) -> tuple[subprocess.Popen[bytes], Connection]:
    """Starts one rank and sends its orders. Its output goes to this process's standard error."""
    ours, theirs = Pipe()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "ferryman.engine.tensor_parallel.rank", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=STDERR,
            pass_fds=(theirs.fileno(),),
        )
    ours.send_bytes(orders.to_json())
    return process, ours


def _end(process: subprocess.Popen[bytes]) -> None:
    """Waits for a rank to end after its command or its closed connection; kills it if it does
    not."""
    try:
        process.wait(CLOSE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
