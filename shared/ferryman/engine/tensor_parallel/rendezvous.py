"""The ranks of a worker over torch.distributed: gloo between processors, NCCL between cards.

A process group of our own, never torch's global one: engines of one process stay apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, FileStore

from ferryman.errors import ConfigError

LOOPBACK = "127.0.0.1"


class RankLost(RuntimeError):
    """A rank of this worker failed, is gone or is silent: no step can run any more."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The meeting point of a worker's ranks: a file, visible to all, which the first one creates.

    A collective that lasts longer than `silence_seconds` means a lost rank.
    """

    file: Path
    num_ranks: int
    silence_seconds: float


class _Work(Protocol):
    def wait(self) -> bool: ...


class _Backend(Protocol):
    """The common interface of torch's process groups."""

    def allreduce(self, tensors: list[Tensor]) -> _Work: ...

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> _Work: ...

    def broadcast(self, tensors: list[Tensor], opts: BroadcastOptions) -> _Work: ...


class TorchGroup:
    """One rank's end of a process group. Errors of torch become RankLost."""

    def __init__(self, backend: _Backend, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self._backend = backend

    def summed(self, tensor: Tensor) -> Tensor:
        if tensor.numel():
            _end(lambda: self._backend.allreduce([tensor]))
        return tensor

    def joined(self, tensor: Tensor) -> Tensor:
        parts = [torch.empty_like(tensor) for _ in range(self.num_ranks)]
        if tensor.numel():
            _end(lambda: self._backend.allgather([parts], [tensor]))
        return torch.cat(parts, dim=-1)

    def from_first(self, tensor: Tensor) -> Tensor:
        if tensor.numel():
            _end(lambda: self._backend.broadcast([tensor], _FROM_FIRST))
        return tensor


def _from_first() -> BroadcastOptions:
    options = BroadcastOptions()
    options.rootRank = 0
    return options


_FROM_FIRST = _from_first()


def _end(begin: Callable[[], _Work]) -> None:
    try:
        begin().wait()
    except RuntimeError as error:
        raise RankLost(f"a rank failed, is gone or is silent: {error}") from error


def join(meeting: Rendezvous, rank: int, device: torch.device) -> TorchGroup:
    """This rank's end, once all ranks have joined. Raises RankLost, ConfigError for too few
    cards."""
    store = FileStore(str(meeting.file), meeting.num_ranks)
    timeout = timedelta(seconds=meeting.silence_seconds)
    store.set_timeout(timeout)
    make = _gloo
    if device.type == "cuda":
        first = (device.index or 0) - rank
        check_cards(first, meeting.num_ranks, torch.cuda.device_count())
        make = _nccl
    try:
        backend = make(store, rank, meeting.num_ranks, timeout)
    except RuntimeError as error:
        raise RankLost(f"the ranks did not meet: {error}") from error
    return TorchGroup(backend, rank, meeting.num_ranks)


def _gloo(store: FileStore, rank: int, num_ranks: int, timeout: timedelta) -> _Backend:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    options._timeout = timeout
    return cast(_Backend, dist.ProcessGroupGloo(store, rank, num_ranks, options))


def _nccl(store: FileStore, rank: int, num_ranks: int, timeout: timedelta) -> _Backend:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return cast(_Backend, dist.ProcessGroupNCCL(store, rank, num_ranks, options))


def check_cards(first: int, num_ranks: int, num_cards: int) -> None:
    """Raises ConfigError unless each rank has a card: rank 0 has the `first`."""
    last = first + num_ranks - 1
    if last >= num_cards:
        raise ConfigError(
            f"tp_size={num_ranks} from cuda:{first} on needs cards {first} to {last}, there are "
            f"{num_cards}, numbered from 0"
        )


def device_of_rank(device: str, rank: int) -> torch.device:
    """All ranks share the processor; cards are numbered on from the worker's own."""
    first = torch.device(device)
    return torch.device("cuda", (first.index or 0) + rank) if first.type == "cuda" else first
