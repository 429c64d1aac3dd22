"""The ways in which a request came to its state, and where each unit of it came from."""

from __future__ import annotations

from ferryman.cache.manifest import Kind
from ferryman.cache.resume import ClearState, CopyState, LoadState, ReceiveState, ResumePlan
from ferryman.schedule.sequence import RunningSequence

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
