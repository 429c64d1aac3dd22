"""Re-cutting: one slot of a whole model as slots of its ranks, and back.

The whole layout is that of a model which nobody cut: tiers, hand-offs and digests speak it alone.
Each rank of a worker keeps its share of every section in a layout of its own, so workers that are
cut differently exchange state without knowing it.

    whole     │ key: head 0 · head 1 · head 2 · head 3 │ value: … │ conv.x … │ conv.B … │
    rank 0    │ key: head 0 · head 1 │ value: … │           a section of d along its shard axis, of
    rank 1    │ key: head 2 · head 3 │ value: … │           which a rank keeps l, has d / l pieces

Rank r of n keeps piece r · (d / l) // n. With fewer pieces than ranks, neighbours keep the same
one: replicated heads, as many times as d / l goes into n.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from ferryman.cache.manifest import DTYPE_BYTES, KindLayout, Section, StateManifest


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes that lie in one piece in both slots: at `offset` of the whole, at `rank_offset`."""

    rank: int
    rank_offset: int
    offset: int
    num_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes

    def clipped(self, begin: int, end: int) -> Run:
        """What of it lies in [begin, end) of the whole slot, which it overlaps."""
        first, last = max(self.offset, begin), min(self.end, end)
        return Run(self.rank, self.rank_offset + first - self.offset, first, last - first)


@dataclass(frozen=True, slots=True)
class Recut:
    """How slots of one kind are cut.

    `scattered`: every run of every rank. `gathered`: each byte of the whole once, from the first
    rank that keeps it. Neither holds the padding between sections, which is zero in all slots.
    """

    slot_bytes: int
    rank_slot_bytes: int
    scattered: tuple[Run, ...]
    gathered: tuple[Run, ...]

    def scattered_within(self, begin: int, end: int) -> Iterator[Run]:
        """The runs that the bytes [begin, end) of a whole slot go to."""
        for run in self.scattered:
            if run.offset < end and run.end > begin:
                yield run.clipped(begin, end)


def over_ranks(whole: StateManifest, of_rank: StateManifest, num_ranks: int) -> StateManifest:
    """`whole`, its slots as large as what all ranks keep of one: the manifest to size pools by."""
    layouts = [
        replace(layout, slot_bytes=num_ranks * of_rank.layout(layout.kind).slot_bytes)
        for layout in whole.layouts
    ]
    return replace(whole, layouts=tuple(layouts))


def recut(whole: KindLayout, of_rank: KindLayout, num_ranks: int) -> Recut:
    """How `whole` is cut for `num_ranks` ranks that keep `of_rank` each.

    Raises ValueError, naming the section, when the one is no cut of the other.
    """
    if len(whole.sections) != len(of_rank.sections):
        raise ValueError(f"{len(of_rank.sections)} sections are no cut of {len(whole.sections)}")
    scattered: list[Run] = []
    gathered: list[Run] = []
    pairs = list(zip(whole.sections, of_rank.sections, strict=True))
    for rank in range(num_ranks):
        for section, share in pairs:
            runs = list(_runs(section, share, rank, num_ranks))
            scattered += runs
            if _is_first_holder(section, share, rank, num_ranks):
                gathered += runs
    return Recut(whole.slot_bytes, of_rank.slot_bytes, _merged(scattered), _merged(gathered))


def num_pieces(section: Section, share: Section) -> int:
    """Into how many different pieces ranks that keep `share` have cut `section`."""
    axis = section.shard_axis
    if axis is None or section.shape == share.shape:
        pieces, is_cut = 1, section.shape == share.shape
    else:
        length, kept = section.shape[axis], share.shape[axis]
        pieces = length // kept if kept else 0
        is_cut = pieces * kept == length and _but(section.shape, axis) == _but(share.shape, axis)
    names = (section.name, section.layer, section.dtype) == (share.name, share.layer, share.dtype)
    if not (is_cut and names):
        raise ValueError(f"{share} is no cut of {section}")
    return pieces


def piece_of(pieces: int, rank: int, num_ranks: int) -> int:
    """The piece that a rank keeps. Raises ValueError where ranks and pieces do not go even."""
    if num_ranks % pieces:
        raise ValueError(f"{pieces} pieces cannot be kept by {num_ranks} ranks")
    return rank * pieces // num_ranks


def _but(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]


def _is_first_holder(section: Section, share: Section, rank: int, num_ranks: int) -> bool:
    pieces = num_pieces(section, share)
    piece = piece_of(pieces, rank, num_ranks)
    return rank == 0 or piece_of(pieces, rank - 1, num_ranks) != piece


def _runs(section: Section, share: Section, rank: int, num_ranks: int) -> Iterator[Run]:
    """The share of one rank: one run for every index along the axes before the shard axis."""
    pieces = num_pieces(section, share)
    axis = section.shard_axis if pieces > 1 else None
    if axis is None:
        yield Run(rank, share.offset, section.offset, section.num_bytes)
        return
    inner_bytes = prod(section.shape[axis + 1 :]) * DTYPE_BYTES[section.dtype]
    whole_bytes, kept_bytes = section.shape[axis] * inner_bytes, share.shape[axis] * inner_bytes
    begin = section.offset + piece_of(pieces, rank, num_ranks) * kept_bytes
    for outer in range(prod(section.shape[:axis])):
        at = begin + outer * whole_bytes
        yield Run(rank, share.offset + outer * kept_bytes, at, kept_bytes)


def _merged(runs: Sequence[Run]) -> tuple[Run, ...]:
    """The same bytes in as few runs as there are, in the order of the ranks."""
    merged: list[Run] = []
    for run in runs:
        if merged and _continues(merged[-1], run):
            before = merged.pop()
            length = before.num_bytes + run.num_bytes
            run = Run(run.rank, before.rank_offset, before.offset, length)
        merged.append(run)
    return tuple(merged)


def _continues(before: Run, run: Run) -> bool:
    return (before.rank, before.end, before.rank_offset + before.num_bytes) == (
        run.rank,
        run.offset,
        run.rank_offset,
    )
