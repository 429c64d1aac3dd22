"""Residence: which slots a request holds and when they go back. One transaction in, one way out.

Slots of a request are given back only when the last step in flight has committed: until then the
device may still read or write them, so nobody else may have them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ferryman.cache.capacity import path_snapshots
from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.resume import CopyFrom, ResumePlan, resume_set
from ferryman.cache.slots import TREE, Demand, Holder, Pools, Role, SlotHandle
from ferryman.cache.tree import PrefixTree
from ferryman.schedule.drafting import NOTHING_PROPOSED, Proposals
from ferryman.schedule.limits import SchedulerLimits
from ferryman.schedule.request import Request
from ferryman.schedule.rows import RowTable
from ferryman.schedule.sequence import Running, Waiting


@dataclass(frozen=True, slots=True)
class _Retired:
    """What goes back once step `after` has committed."""

    after: int
    slots: tuple[SlotHandle, ...]
    holder: Holder
    held_keys: tuple[PageKey, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Pinned:
    """What admission leased before it allocated."""

    holder: Holder
    windows: tuple[SlotHandle, ...]
    source: tuple[SlotHandle, ...]


def slot_op_holder(request_id: str) -> Holder:
    """Keeps the source of a copy alive from planning until the step has run."""
    return Holder(Role.SLOT_OP, request_id)


class Residence:
    """The pools, the tree and the rows of one worker, and everything that moves between them."""

    def __init__(self, manifest: StateManifest, sizes: Demand, limits: SchedulerLimits) -> None:
        self.manifest = manifest
        self._drafting = limits.drafting
        self.pools = Pools(sizes)
        self.tree = PrefixTree.of(manifest, path_snapshots(sizes.get(Kind.RECURRENT, 0)))
        max_pages = -(-limits.max_len // manifest.page_size) + 1
        num_drafts = limits.drafting.num_tokens
        self.rows = RowTable(limits.concurrency.rows, max_pages, manifest.kinds, num_drafts)
        self._retired: deque[_Retired] = deque()
        self._submitted = 0
        self._committed = 0

    # Steps, as far as ownership cares.

    def submitted(self, step_id: int) -> None:
        self._submitted = step_id

    def committed(self, step_id: int) -> None:
        """Gives back what waited for this step."""
        self._committed = step_id
        while self._retired and self._retired[0].after <= step_id:
            self._give_back(self._retired.popleft())

    def retire(
        self,
        slots: Iterable[SlotHandle],
        holder: Holder,
        held_keys: Iterable[PageKey] = (),
        rows: Iterable[int] = (),
    ) -> None:
        """Gives back leases, holds and rows: now if no step is in flight, else after the last."""
        retired = _Retired(self._submitted, tuple(slots), holder, tuple(held_keys), tuple(rows))
        if self._committed == self._submitted:
            self._give_back(retired)
        else:
            self._retired.append(retired)

    def _give_back(self, retired: _Retired) -> None:
        self.pools.release(retired.slots, retired.holder)
        for key in retired.held_keys:
            self.tree.release(key)
        for row in retired.rows:
            self.rows.give_back(row)

    # In: one transaction over all pools.

    def try_admit(
        self, waiting: Waiting, plan: ResumePlan, holder: Holder, headroom: int, now: float
    ) -> Running | None:
        """Pins what is reused, evicts, allocates; or leaves everything as it was and says None.

        `headroom` full pages must stay free besides, so that requests already running can grow.
        """
        if not self.rows.num_free:
            return None
        pinned = self._pin(waiting.request, plan, holder, now)
        taken = self.try_take(plan.demand, holder, headroom)
        if taken is None:
            self._unpin(waiting.request, plan, pinned)
            return None
        return self._settle(waiting, plan, taken, pinned)

    def _proposals(self, waiting: Waiting) -> Proposals:
        return self._drafting.begin(waiting.request) if waiting.num_decoded else NOTHING_PROPOSED

    def try_take(
        self, demand: Demand, holder: Holder, headroom: int = 0
    ) -> dict[Kind, tuple[SlotHandle, ...]] | None:
        """Fresh slots of all kinds at once, evicting from the tree what that needs; or None."""
        wanted = {k: n + (headroom if k is Kind.FULL else 0) for k, n in demand.items()}
        if not self._try_make_room(wanted):
            return None
        return self.pools.try_allocate(demand, holder)

    def _try_make_room(self, wanted: Demand) -> bool:
        """Evicts what is lacking in all pools, or nothing: what cannot be met costs no cache."""
        if lacks := self.pools.shortage(wanted):
            dropped = self.tree.try_evict(lacks, self._is_only_tree)
            if dropped is None:
                return False
            self.pools.release(dropped, TREE)
        return True

    def make_room(self, wanted: Demand) -> None:
        """Evicts as much of what is lacking as can go."""
        for kind, lack in self.pools.shortage(wanted).items():
            self.pools.release(self.tree.evict(kind, lack, self._is_only_tree), TREE)

    def next_to_evict(self, kind: Kind) -> Iterator[PageKey]:
        """Keys in the order of eviction, without evicting."""
        return self.tree.next_to_evict(kind, self._is_only_tree)

    def _is_only_tree(self, handle: SlotHandle) -> bool:
        return self.pools[handle.kind].holders(handle) == (TREE,)

    def _pin(self, request: Request, plan: ResumePlan, holder: Holder, now: float) -> _Pinned:
        """Protects the reused path, and leases the window pages and the snapshot to be read."""
        keys = request.keys
        if plan.anchor_pages:
            self.tree.hold(keys[plan.anchor_pages - 1], now)
        windows = [self.tree.slot(Kind.WINDOW, keys[page]) for page in plan.window_pages]
        source: tuple[SlotHandle, ...] = ()
        if isinstance(plan.initialiser, CopyFrom):
            self.tree.touch(plan.initialiser.key, now)
            source = (self.tree.slot(Kind.RECURRENT, plan.initialiser.key),)
        self.pools.lease(windows, holder)
        self.pools.lease(source, slot_op_holder(request.request_id))
        return _Pinned(holder, tuple(windows), source)

    def _unpin(self, request: Request, plan: ResumePlan, pinned: _Pinned) -> None:
        self.pools.release(pinned.windows, pinned.holder)
        self.pools.release(pinned.source, slot_op_holder(request.request_id))
        if plan.anchor_pages:
            self.tree.release(request.keys[plan.anchor_pages - 1])

    def _settle(
        self,
        waiting: Waiting,
        plan: ResumePlan,
        taken: dict[Kind, tuple[SlotHandle, ...]],
        pinned: _Pinned,
    ) -> Running:
        recurrent = list(taken.get(Kind.RECURRENT, ()))
        sequence = Running(
            waiting,
            plan,
            holder=pinned.holder,
            row=self.rows.take(),
            own=self._map_pages(plan, taken, pinned.windows),
            spare=[],
            working=recurrent.pop(0) if recurrent else None,
            scratch=recurrent[len(plan.snapshots) :],
            proposals=self._proposals(waiting),
            snapshots=dict(zip(plan.snapshots, recurrent, strict=False)) if recurrent else {},
            copy_source=pinned.source,
        )
        self._spread_windows(sequence, plan, taken.get(Kind.WINDOW, ()))
        self._fill_row(sequence)
        return sequence

    def _map_pages(
        self,
        plan: ResumePlan,
        taken: dict[Kind, tuple[SlotHandle, ...]],
        windows: Sequence[SlotHandle],
    ) -> dict[Kind, dict[int, SlotHandle]]:
        own: dict[Kind, dict[int, SlotHandle]] = {}
        if Kind.FULL in taken:
            own[Kind.FULL] = dict(enumerate(taken[Kind.FULL], start=plan.anchor_pages))
        if Kind.WINDOW in taken:
            own[Kind.WINDOW] = dict(zip(plan.window_pages, windows, strict=True))
        return own

    def _spread_windows(
        self, sequence: Running, plan: ResumePlan, fresh: Sequence[SlotHandle]
    ) -> None:
        """Window slots go to the pages that are loaded or received first, then wait as spare."""
        sequence.spare = list(fresh)
        for page in self._window_pages_to_fill(plan):
            sequence.own[Kind.WINDOW][page] = sequence.spare.pop()

    def _window_pages_to_fill(self, plan: ResumePlan) -> list[int]:
        loaded = [unit.page_index for unit in plan.loads if unit.kind is Kind.WINDOW]
        if plan.position < plan.prompt_len:
            return loaded
        window = resume_set(self.manifest, plan.position).window
        return [page for page in range(window.first, window.end) if page not in plan.window_pages]

    def _fill_row(self, sequence: Running) -> None:
        rows, row, plan = self.rows, sequence.row, sequence.plan
        rows.states[row, : 1 + len(sequence.scratch)] = [
            sequence.working_slot,
            *(handle.slot for handle in sequence.scratch),
        ]
        rows.positions[row] = plan.position
        if plan.anchor_pages and Kind.FULL in self.manifest.kinds:
            path = self.tree.slots_of(Kind.FULL, sequence.keys[: plan.anchor_pages])
            rows.set_pages(Kind.FULL, row, 0, [handle.slot for handle in path])
        for kind, pages in sequence.own.items():
            for page, handle in pages.items():
                rows.set_page(kind, row, page, handle.slot)

    # Out: leases drop.

    def leave(self, sequence: Running) -> None:
        """Everything a request still holds goes back, once the device is done with it."""
        self.release_copy_source(sequence)
        anchor = sequence.anchor_pages
        held = (sequence.keys[anchor - 1],) if anchor else ()
        self.retire(sequence.slots(), sequence.holder, held, (sequence.row,))

    def release_copy_source(self, sequence: Running) -> None:
        """The step that copies it is submitted (or never will be): the lease ends behind it."""
        source, sequence.copy_source = sequence.copy_source, ()
        if source:
            self.retire(source, slot_op_holder(sequence.request_id))

    def check_integrity(self) -> None:
        self.pools.check_integrity()
        self.tree.check_integrity()
