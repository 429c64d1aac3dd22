"""Retraction: a request goes back to wait, with its known tokens, so that others can go on.

vLLM calls it preempt. Computed state is offloaded to the host if possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ferryman.cache.candidates import resume_depths, resume_unit_names
from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import StateManifest
from ferryman.cache.resume import EMPTY_HOST
from ferryman.cache.slots import Holder, Role, SlotHandle
from ferryman.cache.tree import PrefixTree
from ferryman.schedule.events import CachedUnit, Event, Retracted
from ferryman.schedule.request_table import SequenceTable
from ferryman.schedule.sequence import Goal, PendingRequest, Phase, RunningSequence
from ferryman.schedule.slot_allocator import SlotAllocator
from ferryman.schedule.tree_publisher import TreePublisher


class Retraction:
    """Pushes requests back, and keeps their state leased while it is copied."""

    def __init__(
        self,
        allocator: SlotAllocator,
        sequences: SequenceTable,
        publisher: TreePublisher | None,
        events: list[Event],
    ) -> None:
        self._allocator = allocator
        self._sequences = sequences
        self._publisher = publisher
        self._events = events
        self._keeps = False
        self._kept: dict[str, tuple[SlotHandle, ...]] = {}

    @property
    def is_keeping(self) -> bool:
        """Whether slots come free when a copy ends."""
        return bool(self._kept)

    def retract(self, sequence: RunningSequence, now: float) -> None:
        """Pushes back at once when no step holds it; else after its last step, whose token still
        counts."""
        self._sequences.decoding.remove(sequence)
        if sequence.in_flight:
            sequence.phase = Phase.RETRACTING
        else:
            self.push_back(sequence, now)

    def push_back(self, sequence: RunningSequence, now: float) -> None:
        """Donates its state, gives all slots back and waits in its old place."""
        if self._publisher:
            self._publisher.donate(sequence, now)
        if self._keeps:
            self._keep(sequence)
        self._sequences.leave(sequence)
        request = replace(
            sequence.request,
            token_ids=sequence.token_ids(),
            keys=sequence.keys,
            num_generated=sequence.num_generated,
        )
        self._events.append(Retracted(request.request_id, request.num_generated, request))
        waiting = PendingRequest(
            sequence.order, request, Goal.DECODE, EMPTY_HOST, True, sequence.counts
        )
        self._sequences.waiting.enter(waiting)

    # State that is copied elsewhere, because its slots are needed.

    def pin_retracted(self) -> None:
        """Makes each later retraction keep its resume set until `release_retracted`."""
        self._keeps = True

    def _keep(self, sequence: RunningSequence) -> None:
        units = resume_units(self._allocator.manifest, self._allocator.tree, sequence.keys)
        if handles := tuple(unit.handle for unit in units):
            self._allocator.pools.lease(handles, _keeper(sequence.request_id))
            self._kept[sequence.request_id] = handles

    def release_retracted(self, request_id: str) -> None:
        """Ends the lease: the copy has ended, or will not be made. Unknown requests are fine."""
        self._allocator.pools.release(self._kept.pop(request_id, ()), _keeper(request_id))


def _keeper(request_id: str) -> Holder:
    """The holder of a retracted request's state while it is copied."""
    return Holder(Role.STORE, f"{request_id} retracted")


def resume_units(
    manifest: StateManifest, tree: PrefixTree, keys: Sequence[PageKey]
) -> tuple[CachedUnit, ...]:
    """The whole resume set at the deepest point of a chain that the tree can resume from."""
    depth = next(resume_depths(tree, manifest, keys, tree.match_depth(keys)), 0)
    names = resume_unit_names(manifest, depth)
    return tuple(CachedUnit(k, p, keys[p], tree.slot(k, keys[p])) for k, p in names)
