"""The ranks of a worker: the share of the model on each, and their collectives in a step.

Tensor parallelism after Shoeybi et al. (2019, Megatron-LM): projections into heads are divided by
rows, projections out of heads by columns, and one sum over the ranks ends each mixer and each
feed-forward. Every rank calls the same collectives in the same order for any data: number and order
follow from the step's vector alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

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
class SingleRank:
    """The one rank of an undivided model."""

    rank: int = 0
    num_ranks: int = 1

    def summed(self, tensor: Tensor) -> Tensor:
        return tensor

    def joined(self, tensor: Tensor) -> Tensor:
        return tensor

    def from_first(self, tensor: Tensor) -> Tensor:
        return tensor


SINGLE_RANK: Group = SingleRank()


class Divisible(Protocol):
    """A tensor, or a matrix in any form, that can be cut along its axes."""

    @property
    def shape(self) -> Sequence[int]: ...

    def narrow(self: Cuttable, axis: int, start: int, length: int, /) -> Cuttable: ...


Cuttable = TypeVar("Cuttable", bound=Divisible)


def per_rank(name: str, count: int, num_ranks: int) -> int:
    """`count` / `num_ranks`. Raises ConfigError, with `name`, if there is a remainder."""
    if count % num_ranks:
        raise ConfigError(f"tp_size={num_ranks} does not divide {name} {count}")
    return count // num_ranks


def per_rank_replicated(name: str, count: int, num_ranks: int) -> int:
    """Divides as `per_rank`, but fewer heads than ranks are replicated: each rank keeps one."""
    return 1 if num_ranks % count == 0 else per_rank(name, count, num_ranks)


def share_of(whole: Cuttable, heads: int, group: Group, *, axis: int = 0) -> Cuttable:
    """A rank's heads of a tensor with `heads` of them, one after the other, along `axis`."""
    pieces = min(heads, group.num_ranks)
    piece = piece_of(pieces, group.rank, group.num_ranks)
    length = whole.shape[axis] // pieces
    return whole.narrow(axis, piece * length, length)


def slice_of(whole: Cuttable, group: Group, *, axis: int = 0) -> Cuttable:
    """A rank's part of an axis that may be cut anywhere; the parts may differ in length by one."""
    length, longer = divmod(whole.shape[axis], group.num_ranks)
    start = group.rank * length + min(group.rank, longer)
    return whole.narrow(axis, start, length + (group.rank < longer))
