"""The usable part of a chain in a tree, and the units granted to a reader. Not counted as uses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, takewhile

from ferryman.cache.candidates import resume_depths
from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.resume import resume_set
from ferryman.cache.tree import PrefixTree
from ferryman.tiers.values import AcquireRequest, Residency, UnitName

# The deepest resume point, and a second one as a fallback if loading the first costs more than
# computing.
MAX_SNAPSHOTS_GRANTED = 2


def window_before(manifest: StateManifest, depth: int) -> range:
    """The window pages that the end of page `depth` - 1 needs."""
    return range(*resume_set(manifest, depth * manifest.page_size).window)


def usable_pages(tree: PrefixTree, manifest: StateManifest, keys: Sequence[PageKey]) -> int:
    """The longest prefix, in pages, whose whole resume set is in the tree."""
    return next(resume_depths(tree, manifest, keys, tree.match_depth(keys)), 0)


def residency(tree: PrefixTree, manifest: StateManifest, keys: Sequence[PageKey]) -> Residency:
    """All units of a chain in the tree."""
    pages = {
        kind: tuple(page for page, key in enumerate(keys) if tree.has(kind, key))
        for kind in manifest.kinds
    }
    return Residency(usable_pages(tree, manifest, keys), pages)


def resume_points(
    tree: PrefixTree, manifest: StateManifest, ask: AcquireRequest, matched: int
) -> list[int]:
    """The depths that a reader may resume from, deepest first. They are few because each costs a
    lease."""
    limit = min(matched, ask.max_pages)
    most = MAX_SNAPSHOTS_GRANTED if Kind.RECURRENT in manifest.kinds else 1
    depths = resume_depths(tree, manifest, ask.keys, limit)
    return list(islice(takewhile(lambda depth: depth > ask.min_pages, depths), most))


def granted_units(
    manifest: StateManifest, ask: AcquireRequest, matched: int, points: Sequence[int]
) -> list[UnitName]:
    """The units that a reader needs for these resume points; `matched` pages of the chain are here.

    Full pages are granted even beyond the last resume point: they show where the prompt leaves the
    known path.
    """
    kinds = manifest.kinds
    names: list[UnitName] = []
    if Kind.FULL in kinds:
        names += [(Kind.FULL, page) for page in range(ask.have_pages, matched)]
    if Kind.WINDOW in kinds:
        pages = sorted({page for depth in points for page in window_before(manifest, depth)})
        names += [(Kind.WINDOW, page) for page in pages]
    if Kind.RECURRENT in kinds:
        names += [(Kind.RECURRENT, depth - 1) for depth in sorted(points)]
    return names
