"""Ranks as threads of one process, whose collectives fail where the ranks are not in step.

Each call says what it is: the operation, the line that made it, the tensor's shape and dtype. A
rank that calls something else, or ends while others still call, is an error that names both.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

PATIENCE_SECONDS = 120.0
_OWN_FILE = __file__


class OutOfStep(AssertionError):
    """Two ranks made different calls where all should have made the same."""


@dataclass(frozen=True, slots=True)
class Call:
    """A collective as one rank made it; `site` is the line that asked for it."""

    operation: str
    site: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Lockstep:
    """The meeting place of `num_ranks` ranks. `calls` is what all of them did, in order."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.calls: list[Call] = []
        self._barrier = threading.Barrier(num_ranks, timeout=PATIENCE_SECONDS)
        self._offers: list[tuple[Call | None, Tensor]] = [(None, torch.empty(0))] * num_ranks

    def run(self, work: Callable[[LockstepGroup], T]) -> list[T]:
        """The result of `work` on each rank. Raises OutOfStep, or the first error of any rank."""

        def attempt(rank: int) -> T:
            try:
                found = work(LockstepGroup(self, rank))
                self._meet(rank, None, torch.empty(0))
            except BaseException:
                self._barrier.abort()
                raise
            return found

        with ThreadPoolExecutor(self.num_ranks) as pool:
            futures = [pool.submit(attempt, rank) for rank in range(self.num_ranks)]
        raised = [error for future in futures if (error := future.exception()) is not None]
        causes = [error for error in raised if not isinstance(error, threading.BrokenBarrierError)]
        for error in causes or raised:
            raise error
        return [future.result() for future in futures]

    def exchanged(self, rank: int, operation: str, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, once all of them have made this call."""
        return self._meet(rank, Call(operation, _site(), tuple(tensor.shape), tensor.dtype), tensor)

    def _meet(self, rank: int, call: Call | None, tensor: Tensor) -> list[Tensor]:
        self._offers[rank] = (call, tensor.clone())
        self._barrier.wait()
        offers = list(self._offers)
        if self._barrier.wait() == 0 and call is not None:
            self.calls.append(call)
        if len({made for made, _ in offers}) > 1:
            made = "; ".join(f"rank {i}: {made or 'the end'}" for i, (made, _) in enumerate(offers))
            raise OutOfStep(made)
        return [offered for _, offered in offers]


@dataclass(frozen=True, slots=True)
class LockstepGroup:
    """A model's `Group` in lockstep; sums add in the order of the ranks, on every rank."""

    meeting: Lockstep
    rank: int

    @property
    def num_ranks(self) -> int:
        return self.meeting.num_ranks

    def summed(self, tensor: Tensor) -> Tensor:
        parts = self.meeting.exchanged(self.rank, "sum", tensor)
        return tensor.copy_(torch.stack(parts).sum(0))

    def joined(self, tensor: Tensor) -> Tensor:
        return torch.cat(self.meeting.exchanged(self.rank, "join", tensor), dim=-1)

    def from_first(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(self.meeting.exchanged(self.rank, "tell", tensor)[0])


def _site() -> str:
    frame = sys._getframe(1)
    while frame.f_code.co_filename == _OWN_FILE and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
