"""Chooses the units of an offer that become one extent, and their offsets. Changes nothing."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import StateManifest
from ferryman.tiers.extents import ExtentLayout, lay_out_extent
from ferryman.tiers.storage_values import ExtentPlan
from ferryman.tiers.unit_group import Group, WriteOffer
from ferryman.tiers.values import StoredUnit, UnitName


def num_pages(group: Iterable[UnitName]) -> int:
    """The number of pages of the chain that a group covers, from page 0."""
    return 1 + max(page for _, page in group)


def layout_of(manifest: StateManifest, group: Group) -> ExtentLayout:
    """The offsets of the units of a group, in the order of the group."""
    sizes = [manifest.layout(kind).slot_bytes for kind, _ in group]
    return lay_out_extent(num_pages(group), sizes)


def largest_group(
    manifest: StateManifest, offer: WriteOffer, wanted: Group, num_bytes: int
) -> Group:
    """All units of `wanted`, or those that fit into `num_bytes` up to the deepest resume point; or
    ()."""

    def fits(group: Group) -> bool:
        return not group or layout_of(manifest, group).file_bytes <= num_bytes

    if fits(wanted):
        return wanted
    points = list(offer.points())
    # Points are descending; a group that fits at one point also fits at every shallower one.
    best = bisect_left(points, True, key=lambda depth: fits(offer.minimal(depth)))
    groups = (cut(depth) for depth in points[best:][:1] for cut in (offer.prefix, offer.minimal))
    return next((group for group in groups if fits(group)), ())


def plan_extent(
    manifest: StateManifest,
    keys: Sequence[PageKey],
    digests: Mapping[UnitName, bytes],
    generation: int,
    *,
    num_asked: int,
) -> ExtentPlan:
    """The extent of the units of `digests`, in their order."""
    group = tuple(digests)
    layout = layout_of(manifest, group)
    units = tuple(
        StoredUnit(
            kind=kind,
            page_index=page,
            key=keys[page],
            num_bytes=manifest.layout(kind).slot_bytes,
            digest=digests[kind, page],
            generation=generation,
            index=index,
            offset=layout.offsets[index],
        )
        for index, (kind, page) in enumerate(group)
    )
    return ExtentPlan(
        generation, tuple(keys[: num_pages(group)]), units, layout.file_bytes, num_asked
    )


def places(units: Iterable[StoredUnit]) -> list[tuple[int, tuple[int, int]]]:
    """The index, offset and bytes of each unit."""
    return [(unit.index, (unit.offset, unit.num_bytes)) for unit in units]
