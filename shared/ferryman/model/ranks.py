"""The ranks of a worker: each holds a share of the model, and what they tell each other in a step.

Tensor parallelism after Shoeybi et al. (2019, Megatron-LM): what goes into heads is cut by its
rows, what comes out of them by its columns, and one sum over the ranks ends each mixer and each
feed-forward. Every rank calls the same collectives in the same order, whatever its data: number
and order follow from the step's vector alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ferryman.cache.shards import piece_of
from ferryman.errors import ConfigError


class Group(Protocol):
    """The ranks of one worker, as one of them sees them. A call raises RankLost if one is gone."""

    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    def summed(self, tensor: Tensor) -> Tensor:
        """The sum of every rank's `tensor`, in its place; the same bits on all ranks."""
        ...

    def joined(self, tensor: Tensor) -> Tensor:
        """Every rank's [tokens, dim] side by side: [tokens, ranks × dim]."""
        ...

    def from_first(self, tensor: Tensor) -> Tensor:
        """Rank 0's `tensor`, in place of this rank's, which has the same shape and dtype."""
        ...


@dataclass(frozen=True, slots=True)
class Alone:
    """The one rank of a model that nobody cut."""

    rank: int = 0
    num_ranks: int = 1

    def summed(self, tensor: Tensor) -> Tensor:
        return tensor

    def joined(self, tensor: Tensor) -> Tensor:
        return tensor

    def from_first(self, tensor: Tensor) -> Tensor:
        return tensor


ALONE: Group = Alone()


def divided(name: str, count: int, num_ranks: int) -> int:
    """How many of `count` each rank holds. Raises ConfigError where they do not divide."""
    if count % num_ranks:
        raise ConfigError(f"tp_size={num_ranks} does not divide {name} {count}")
    return count // num_ranks


def kept(name: str, count: int, num_ranks: int) -> int:
    """As `divided`, but fewer than there are ranks are replicated: each rank keeps one."""
    return 1 if num_ranks % count == 0 else divided(name, count, num_ranks)


def share_of(tensor: Tensor, heads: int, group: Group, *, axis: int = 0) -> Tensor:
    """A rank's heads of a tensor that holds `heads` of them, one behind the other, along `axis`."""
    pieces = min(heads, group.num_ranks)
    piece = piece_of(pieces, group.rank, group.num_ranks)
    length = tensor.shape[axis] // pieces
    return tensor.narrow(axis, piece * length, length)


def slice_of(tensor: Tensor, group: Group, *, axis: int = 0) -> Tensor:
    """A rank's part of an axis along which any place is good to cut; parts may differ by one."""
    return torch.tensor_split(tensor, group.num_ranks, axis)[group.rank]
