"""Units by absolute index: what prefill holds of a prompt, what decode lacks, what a resume needs.

A page's index is its page; a recurrent unit's is its position, the length of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.resume import resume_set
from ferryman.cache.slots import SlotHandle
from ferryman.cache.tree import PrefixTree
from ferryman.schedule.events import CachedUnit
from ferryman.schedule.sequence import Running

Units = list[tuple[int, SlotHandle]]
Keys = Sequence[PageKey]


def held_units(sequence: Running, tree: PrefixTree, kind: Kind, first: int, end: int) -> Units:
    """Units [first, end) that the prompt lies in: its own, or the tree's. KeyError if lacking."""
    if kind is Kind.RECURRENT:
        return [(first, sequence.working)] if sequence.working else []
    own = sequence.own[kind]
    return [
        (page, own.get(page) or tree.slot(kind, sequence.keys[page])) for page in range(first, end)
    ]


def wanted_units(sequence: Running, kind: Kind, first: int, end: int) -> Units:
    """What a transfer writes of [first, end). Nobody may write to what decode holds already."""
    if kind is Kind.RECURRENT:
        units = {sequence.prompt_len: sequence.working} if sequence.working else {}
    else:
        reused = sequence.plan.window_pages if kind is Kind.WINDOW else ()
        units = {p: h for p, h in sequence.own[kind].items() if p not in reused}
    return [(index, units[index]) for index in sorted(units) if first <= index < end]


def resume_units(manifest: StateManifest, tree: PrefixTree, keys: Keys) -> tuple[CachedUnit, ...]:
    """The whole resume set at the deepest point of a chain that the tree can resume from."""
    for depth in _depths(manifest, tree, keys):
        needs = resume_set(manifest, depth * manifest.page_size)
        point = [(Kind.WINDOW, page) for page in range(*needs.window)]
        point += [(Kind.RECURRENT, depth - 1)] if needs.needs_snapshot else []
        if all(tree.has(kind, keys[page]) for kind, page in point):
            names = [*((Kind.FULL, page) for page in range(*needs.full)), *point]
            return tuple(CachedUnit(k, p, keys[p], tree.slot(k, keys[p])) for k, p in names)
    return ()


def _depths(manifest: StateManifest, tree: PrefixTree, keys: Keys) -> Iterable[int]:
    """Where a point may be, deepest first: the last page's window may have been evicted."""
    matched = tree.match_depth(keys)
    if Kind.RECURRENT in manifest.kinds:
        return tree.snapshot_depths(keys, matched)
    return range(matched, 0, -1)
