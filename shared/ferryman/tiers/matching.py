"""What of a chain a tree makes usable. No side effects: nothing counts as a use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.resume import resume_set
from ferryman.cache.tree import PrefixTree
from ferryman.tiers.values import Residency


def window_before(manifest: StateManifest, depth: int) -> range:
    """The window pages that the end of page `depth` - 1 needs."""
    return range(*resume_set(manifest, depth * manifest.page_size).window)


def usable_depths(
    tree: PrefixTree, manifest: StateManifest, keys: Sequence[PageKey], limit: int
) -> Iterator[int]:
    """Depths of which the tree holds the whole resume set, deepest first. The first `limit` pages
    of the chain are in the tree."""
    depths: Iterable[int] = range(limit, 0, -1)
    if Kind.RECURRENT in manifest.kinds:
        depths = tree.snapshot_depths(keys, limit)
    return (depth for depth in depths if _has_window(tree, manifest, keys, depth))


def _has_window(
    tree: PrefixTree, manifest: StateManifest, keys: Sequence[PageKey], depth: int
) -> bool:
    return all(tree.has(Kind.WINDOW, keys[page]) for page in window_before(manifest, depth))


def usable_pages(tree: PrefixTree, manifest: StateManifest, keys: Sequence[PageKey]) -> int:
    """The longest prefix, in pages, of which the tree holds the whole resume set."""
    return next(usable_depths(tree, manifest, keys, tree.match_depth(keys)), 0)


def residency(tree: PrefixTree, manifest: StateManifest, keys: Sequence[PageKey]) -> Residency:
    """All that the tree holds of a chain."""
    pages = {
        kind: tuple(page for page, key in enumerate(keys) if tree.has(kind, key))
        for kind in manifest.kinds
    }
    return Residency(usable_pages(tree, manifest, keys), pages)
