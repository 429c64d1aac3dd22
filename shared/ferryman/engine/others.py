"""The other ranks of a worker, as rank 0 sees them: each runs every step that it is told of."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.engine.copy_side import CopySide, Fence
from ferryman.engine.device_transfer import transfer_of
from ferryman.engine.packing import PackedStep
from ferryman.engine.slabs import Slabs
from ferryman.engine.transfer import Transfer
from ferryman.model.ranks import ALONE, Group


class Told(Protocol):
    """A step that the others were told of."""

    def is_answered(self) -> bool:
        """Whether `wait` returns, or raises, at once."""
        ...

    def wait(self) -> None:
        """Returns when all have run it. Raises RankLost when one failed, is gone or is silent."""
        ...


class Others(Protocol):
    """Ranks 1.. of this worker."""

    @property
    def group(self) -> Group: ...

    def tell(self, packed: PackedStep, fence: Fence) -> Told:
        """Has all of them run a step whose loads end with `fence`. Raises RankLost."""
        ...

    def transfer_of(self, own: Slabs, side: CopySide) -> Transfer:
        """Slots of the whole model, of which `own` holds rank 0's share."""
        ...


@dataclass(frozen=True, slots=True)
class Sizes:
    """What every rank allocates: slots of each kind, rows and tokens of the history."""

    num_slots: Mapping[Kind, int]
    max_rows: int
    max_len: int


class Recruiting(Protocol):
    """The other ranks while models are loaded. `lost` ends, with RankLost, when one is gone."""

    @property
    def group(self) -> Group: ...

    @property
    def lost(self) -> Future[None]: ...

    def allocate(self, whole: StateManifest, of_rank: StateManifest, sizes: Sizes) -> Others:
        """Has all of them make slabs of `of_rank`, their share of `whole`. Raises RankLost."""
        ...


class _Answered:
    def is_answered(self) -> bool:
        return True

    def wait(self) -> None:
        """Nobody was told."""


class NoOthers:
    """A worker of one rank."""

    group = ALONE

    def tell(self, packed: PackedStep, fence: Fence) -> Told:
        return _ANSWERED

    def transfer_of(self, own: Slabs, side: CopySide) -> Transfer:
        return transfer_of(own, side)


class NobodyElse:
    """Nobody to wait for."""

    group = ALONE

    def __init__(self) -> None:
        self.lost: Future[None] = Future()

    def allocate(self, whole: StateManifest, of_rank: StateManifest, sizes: Sizes) -> Others:
        return NO_OTHERS


_ANSWERED = _Answered()
NO_OTHERS: Others = NoOthers()
