"""The units that a request holds at its end, where each came from, and the ways of its reuse."""

from __future__ import annotations

from collections.abc import Iterator

from ferryman.cache.manifest import Kind
from ferryman.cache.resume import (
    ClearState,
    CopyState,
    LoadState,
    ReceiveState,
    ResumePlan,
    resume_set,
)
from ferryman.cache.slots import SlotHandle
from ferryman.schedule.events import HeldUnit
from ferryman.schedule.sequence import RunningSequence
from ferryman.schedule.slot_allocator import SlotAllocator

DEVICE = "device"
HAND_OFF = "hand_off"
RETRACTION = "retraction"
RECOVERY = "recovery"
DRAFTS = "drafts"
COMPUTED = "computed"


def reuse_of(sequence: RunningSequence) -> tuple[str, ...]:
    """The ways in which it reused state, by name; empty if all of it was computed here, once.

    A verified run chooses among the states that were written for its drafts, which is a way, too.
    """
    plan, ways = sequence.plan, dict[str, None]()
    if plan.anchor_pages or plan.window_pages or isinstance(plan.initialiser, CopyState):
        ways[DEVICE] = None
    ways |= {str(unit.origin): None for unit in plan.loads}
    if isinstance(plan.initialiser, ReceiveState):
        ways[HAND_OFF] = None
    if sequence.was_retracted:
        ways[RETRACTION] = None
    elif sequence.request.num_generated:
        ways[RECOVERY] = None
    if sequence.counts.drafted:
        ways[DRAFTS] = None
    return tuple(ways)


def unit_origin(sequence: RunningSequence, kind: Kind, index: int, page_size: int) -> str:
    """The origin of a unit by its plan. A recurrent state is that of the plan, gone on from here.

    A recurrent unit's index is a position.
    """
    plan = sequence.plan
    if kind is Kind.RECURRENT:
        return _state_origin(plan)
    for unit in plan.loads:
        if (unit.kind, unit.page_index) == (kind, index):
            return str(unit.origin)
    reused = plan.window_pages if kind is Kind.WINDOW else range(plan.anchor_pages)
    if index in reused:
        return DEVICE
    is_of_prompt = index * page_size < plan.prompt_len
    is_received = is_of_prompt and isinstance(plan.initialiser, ReceiveState)
    return HAND_OFF if is_received else COMPUTED


def _state_origin(plan: ResumePlan) -> str:
    match plan.initialiser:
        case CopyState():
            return DEVICE
        case LoadState(unit):
            return str(unit.origin)
        case ReceiveState():
            return HAND_OFF
        case ClearState():
            return COMPUTED


def is_certain(sequence: RunningSequence) -> bool:
    """Whether its slots hold the state of tokens that are known: no step in flight consumes more,
    and none of its state was given up or is still to be copied."""
    num_known = sequence.prompt_len + len(sequence.drawn)
    is_whole = not (sequence.is_doubtful or sequence.opening or sequence.verifying)
    return is_whole and sequence.scheduled <= num_known


def held_units(
    allocator: SlotAllocator, sequence: RunningSequence, position: int
) -> tuple[HeldUnit, ...]:
    """The whole resume set of `position`, as the request holds it; empty if it is not whole."""
    needs = resume_set(allocator.manifest, position)
    slots = dict(slots_of(allocator, sequence, position))
    if len(slots) < needs.full.num_pages + needs.window.num_pages + needs.needs_snapshot:
        return ()
    page_size, keys = allocator.manifest.page_size, sequence.keys
    return tuple(
        HeldUnit(
            kind,
            index,
            keys[index] if kind is not Kind.RECURRENT and index < len(keys) else b"",
            handle,
            0 if kind is Kind.RECURRENT else min(page_size, position - index * page_size),
            unit_origin(sequence, kind, index, page_size),
        )
        for (kind, index), handle in slots.items()
    )


def slots_of(
    allocator: SlotAllocator, sequence: RunningSequence, position: int
) -> Iterator[tuple[tuple[Kind, int], SlotHandle]]:
    """The slots of the resume set of `position` that a request has: its own, or the tree's."""
    needs, anchor = resume_set(allocator.manifest, position), sequence.anchor_pages
    if anchor and needs.full.num_pages:
        path = allocator.tree.slots_of(Kind.FULL, sequence.keys[:anchor])
        yield from (((Kind.FULL, page), handle) for page, handle in enumerate(path))
    for kind, span in ((Kind.FULL, needs.full), (Kind.WINDOW, needs.window)):
        pages = sequence.own.get(kind, {})
        yield from (((kind, page), pages[page]) for page in range(*span) if page in pages)
    if needs.needs_snapshot and sequence.working is not None:
        yield (Kind.RECURRENT, position), sequence.working
