"""Re-cutting: one slot of a whole model as slots of its ranks, and back.

The whole layout is that of the undivided model; tiers, hand-offs and digests use it alone. Each
rank of a worker keeps its share of every section in its own layout. So workers with different
numbers of ranks exchange state without knowing it.

    whole     │ key: head 0 · head 1 · head 2 · head 3 │ value: … │ conv.x … │ conv.B … │
    rank 0    │ key: head 0 · head 1 │ value: … │           a section of d along its shard axis, of
    rank 1    │ key: head 2 · head 3 │ value: … │           which a rank keeps l, has d / l pieces

Rank r of n keeps piece r · (d / l) // n. With fewer pieces than ranks, neighbouring ranks keep the
same piece: replicated heads, each n / (d / l) times.

Two workers also move a slot without joining it: from each rank of one to each of the other
(`rank_runs.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from ferryman.cache.manifest import DTYPE_BYTES, KindLayout, Section, StateManifest


@dataclass(frozen=True, slots=True)
class ShardRun:
    """Bytes contiguous in both slots, at `offset` of the whole and `rank_offset` of the rank's."""

    rank: int
    rank_offset: int
    offset: int
    num_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes

    def clipped(self, begin: int, end: int) -> ShardRun:
        """The part of it in [begin, end) of the whole slot. The two must overlap."""
        first, last = max(self.offset, begin), min(self.end, end)
        return ShardRun(self.rank, self.rank_offset + first - self.offset, first, last - first)


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """The way in which slots of one kind are cut.

    `scattered`: every run of every rank. `gathered`: each byte of the whole once, from the first
    rank that keeps it. `repeated`: the same bytes at the other ranks that keep them. None contains
    the padding between sections, which is zero in all slots.
    """

    num_ranks: int
    slot_bytes: int
    rank_slot_bytes: int
    scattered: tuple[ShardRun, ...]
    gathered: tuple[ShardRun, ...]
    repeated: tuple[ShardRun, ...]

    def scattered_within(self, begin: int, end: int) -> Iterator[ShardRun]:
        """The runs that the bytes [begin, end) of a whole slot go to."""
        return _clipped(self.scattered, begin, end)

    def gathered_within(self, begin: int, end: int) -> Iterator[ShardRun]:
        """The runs that make up the bytes [begin, end) of a whole slot."""
        return _clipped(self.gathered, begin, end)


def _clipped(runs: Iterable[ShardRun], begin: int, end: int) -> Iterator[ShardRun]:
    for run in runs:
        if run.offset < end and run.end > begin:
            yield run.clipped(begin, end)


def over_ranks(whole: StateManifest, of_rank: StateManifest, num_ranks: int) -> StateManifest:
    """`whole` with slots as large as the shares of all ranks together: the manifest to size pools
    by."""
    layouts = [
        replace(layout, slot_bytes=num_ranks * of_rank.layout(layout.kind).slot_bytes)
        for layout in whole.layouts
    ]
    return replace(whole, layouts=tuple(layouts))


def reshard(whole: KindLayout, of_rank: KindLayout, num_ranks: int) -> ReshardPlan:
    """The plan that cuts `whole` for `num_ranks` ranks, each of which keeps `of_rank`.

    Raises ValueError, naming the section, when `of_rank` is no cut of `whole`.
    """
    if len(whole.sections) != len(of_rank.sections):
        raise ValueError(f"{len(of_rank.sections)} sections are no cut of {len(whole.sections)}")
    scattered: list[ShardRun] = []
    gathered: list[ShardRun] = []
    repeated: list[ShardRun] = []
    pairs = list(zip(whole.sections, of_rank.sections, strict=True))
    for rank in range(num_ranks):
        for section, share in pairs:
            runs = list(_runs(section, share, rank, num_ranks))
            scattered += runs
            is_first = _is_first_holder(section, share, rank, num_ranks)
            (gathered if is_first else repeated).extend(runs)
    sizes = whole.slot_bytes, of_rank.slot_bytes
    return ReshardPlan(num_ranks, *sizes, *map(_merged, (scattered, gathered, repeated)))


def num_pieces(section: Section, share: Section) -> int:
    """The number of different pieces of `section` when a rank keeps `share`. Raises ValueError."""
    axis = section.shard_axis
    if axis is None or section.shape == share.shape:
        pieces, is_cut = 1, section.shape == share.shape
    else:
        length, kept = section.shape[axis], share.shape[axis]
        pieces = length // kept if kept else 0
        is_cut = pieces * kept == length and _without_axis(section.shape, axis) == _without_axis(
            share.shape, axis
        )
    names = (section.name, section.layer, section.dtype) == (share.name, share.layer, share.dtype)
    if not (is_cut and names):
        raise ValueError(f"{share} is no cut of {section}")
    return pieces


def piece_of(pieces: int, rank: int, num_ranks: int) -> int:
    """The piece that a rank keeps. Raises ValueError if ranks do not divide evenly into pieces."""
    if num_ranks % pieces:
        raise ValueError(f"{pieces} pieces cannot be kept by {num_ranks} ranks")
    return rank * pieces // num_ranks


def _without_axis(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]


def _is_first_holder(section: Section, share: Section, rank: int, num_ranks: int) -> bool:
    pieces = num_pieces(section, share)
    piece = piece_of(pieces, rank, num_ranks)
    return rank == 0 or piece_of(pieces, rank - 1, num_ranks) != piece


def _runs(section: Section, share: Section, rank: int, num_ranks: int) -> Iterator[ShardRun]:
    """The share of one rank: one run for every index along the axes before the shard axis."""
    pieces = num_pieces(section, share)
    axis = section.shard_axis if pieces > 1 else None
    if axis is None:
        yield ShardRun(rank, share.offset, section.offset, section.num_bytes)
        return
    inner_bytes = prod(section.shape[axis + 1 :]) * DTYPE_BYTES[section.dtype]
    whole_bytes, kept_bytes = section.shape[axis] * inner_bytes, share.shape[axis] * inner_bytes
    begin = section.offset + piece_of(pieces, rank, num_ranks) * kept_bytes
    for outer in range(prod(section.shape[:axis])):
        at = begin + outer * whole_bytes
        yield ShardRun(rank, share.offset + outer * kept_bytes, at, kept_bytes)


def _merged(runs: Sequence[ShardRun]) -> tuple[ShardRun, ...]:
    """The same bytes in as few runs as possible, in the order of the ranks."""
    merged: list[ShardRun] = []
    for run in runs:
        if merged and _continues(merged[-1], run):
            before = merged.pop()
            length = before.num_bytes + run.num_bytes
            run = ShardRun(run.rank, before.rank_offset, before.offset, length)
        merged.append(run)
    return tuple(merged)


def _continues(before: ShardRun, run: ShardRun) -> bool:
    return (before.rank, before.end, before.rank_offset + before.num_bytes) == (
        run.rank,
        run.offset,
        run.rank_offset,
    )
