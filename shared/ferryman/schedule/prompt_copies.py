"""Copies of a prompt's end: how decode starts several requests from one hand-off.

The first request of a prompt with siblings freezes what its hand-off has written
(`cache/prompt_ends.py`). It and its siblings get slots of their own as always; the copies run in
the prologue of each one's first decode step, on the forward stream. Their sources are leased until
that step has run, so an end may be dropped at any time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from ferryman.cache.keys import PageKey, prompt_key, root_key
from ferryman.cache.manifest import Kind
from ferryman.cache.prompt_ends import KEPT_SECONDS, PromptEnd, UnitSlots
from ferryman.cache.resume import resume_set
from ferryman.cache.slots import SlotHandle
from ferryman.schedule.batch import SlotCopy
from ferryman.schedule.request import Request
from ferryman.schedule.sequence import RunningSequence
from ferryman.schedule.slot_allocator import SlotAllocator, slot_op_holder


def prompt_name(allocator: SlotAllocator, request: Request) -> PageKey:
    """The name of exactly this prompt, tenant, model and adapter."""
    manifest, keys = allocator.manifest, request.keys
    parent = keys[-1] if keys else root_key(manifest, request.tenant_salt, request.adapter.digest)
    return prompt_key(parent, request.token_ids[len(keys) * manifest.page_size :])


def freeze_end(
    allocator: SlotAllocator, sequence: RunningSequence, headroom: int, now: float
) -> None:
    """Freezes the end of a prompt that was just handed off and published, and gives the request
    fresh slots. If there are none, it keeps its own and its siblings are handed off whole.

    `headroom` full pages stay free for requests that run.
    """
    request = sequence.request
    shares = allocator.has_prefix_cache and request.num_siblings
    # Slots that are still to be copied into hold nothing to freeze; what they copy is frozen.
    if not shares or sequence.is_doubtful or sequence.opening:
        return
    units = dict(_own_units(allocator, sequence))
    demand = Counter(kind for kind, _ in units)
    fresh = allocator.try_take(demand, sequence.holder, headroom) if units else None
    if fresh is None:
        return
    name = prompt_name(allocator, request)
    first = request.keys[0] if request.keys else name
    end = PromptEnd(first, units, request.num_siblings, now + KEPT_SECONDS)
    allocator.prompt_ends.keep(name, end, giver=sequence.holder)
    left = {kind: list(handles) for kind, handles in fresh.items()}
    targets = {unit: left[unit[0]].pop() for unit in units}
    _replace_own(allocator, sequence, targets)
    _copy(allocator, sequence, units, targets)


def _own_units(
    allocator: SlotAllocator, sequence: RunningSequence
) -> Iterator[tuple[tuple[Kind, int], SlotHandle]]:
    """The units of resume_set(n) that no other holder has: those of the tree stay there."""
    needs = resume_set(allocator.manifest, sequence.prompt_len)
    for kind, span in ((Kind.FULL, needs.full), (Kind.WINDOW, needs.window)):
        for page, handle in sequence.own.get(kind, {}).items():
            is_alone = allocator.pools[kind].holders(handle) == (sequence.holder,)
            if page in range(*span) and is_alone:
                yield (kind, page), handle
    if sequence.working is not None:
        yield (Kind.RECURRENT, sequence.prompt_len), sequence.working


def _replace_own(allocator: SlotAllocator, sequence: RunningSequence, fresh: UnitSlots) -> None:
    rows = allocator.rows
    for (kind, index), handle in fresh.items():
        if kind is Kind.RECURRENT:
            sequence.working = handle
            rows.states[sequence.row, 0] = handle.slot
        else:
            sequence.own[kind][index] = handle
            rows.set_page(kind, sequence.row, index, handle.slot)


def share_end(
    allocator: SlotAllocator,
    sequence: RunningSequence,
    wanted: Iterable[tuple[tuple[Kind, int], SlotHandle]],
) -> None:
    """Copies, of the `wanted` units of a reservation, those that are frozen here."""
    if not len(allocator.prompt_ends):
        return
    name = prompt_name(allocator, sequence.request)
    units = allocator.prompt_ends.find(name)
    if units is None:
        return
    targets = {unit: handle for unit, handle in wanted if unit in units}
    _copy(allocator, sequence, units, targets)
    sequence.reuses = sequence.reuses or bool(targets)
    allocator.prompt_ends.came(name, sequence.request.num_siblings)


def _copy(
    allocator: SlotAllocator, sequence: RunningSequence, units: UnitSlots, targets: UnitSlots
) -> None:
    """Notes copies for the first step, and leases their sources until it has run."""
    sources = tuple(units[unit] for unit in targets)
    allocator.pools.lease(sources, slot_op_holder(sequence.request_id))
    sequence.copy_source = sources
    sequence.opening = tuple(
        SlotCopy(units[unit].slot, handle.slot, handle.kind) for unit, handle in targets.items()
    )


def drop_ends(allocator: SlotAllocator, request: Request) -> None:
    """Drops the ends that may have come from the same faulty state as this request's."""
    first = request.keys[0] if request.keys else prompt_name(allocator, request)
    allocator.prompt_ends.drop_chain(first)
