"""The units of a hand-off by absolute index: what prefill holds of a prompt, what decode lacks.

A page's index is its page; a recurrent unit's is its position, the length of the prompt.
"""

from __future__ import annotations

from ferryman.cache.manifest import Kind
from ferryman.cache.slots import SlotHandle
from ferryman.cache.tree import PrefixTree
from ferryman.schedule.sequence import Running

Units = list[tuple[int, SlotHandle]]


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
