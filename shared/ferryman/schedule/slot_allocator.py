"""The slots of each request, from one transaction that takes them to one path that gives them back.

Slots of a request are given back only when the last step in flight has committed: until then the
device may still read or write them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from ferryman.cache.capacity import path_snapshots
from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.prompt_ends import PROMPT_END, PromptEnds
from ferryman.cache.resume import CopyState, ResumePlan, resume_set
from ferryman.cache.slots import TREE, Demand, Holder, Pools, Prepare, Role, SlotHandle, is_ready
from ferryman.cache.tree import PrefixTree
from ferryman.schedule.drafting import NOTHING_PROPOSED, Proposals
from ferryman.schedule.limits import SchedulerLimits
from ferryman.schedule.request import Request
from ferryman.schedule.rows import RowTable
from ferryman.schedule.sequence import PendingRequest, RunningSequence


@dataclass(frozen=True, slots=True)
class _Retired:
    """Slots, holds and rows to give back once step `after` has committed."""

    after: int
    slots: tuple[SlotHandle, ...]
    holder: Holder
    held_keys: tuple[PageKey, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Pinned:
    """Slots that admission leased before it allocated."""

    holder: Holder
    windows: tuple[SlotHandle, ...]
    source: tuple[SlotHandle, ...]


def slot_op_holder(request_id: str) -> Holder:
    """The holder that keeps the source of a copy alive from planning until the step has run."""
    return Holder(Role.SLOT_OP, request_id)


def keeps_all() -> bool:
    """The `give_way` of a worker on which nobody holds slots that others may have."""
    return False


class SlotAllocator:
    """The pools, the tree and the rows of one worker, and the moves of slots between them.

    Without a prefix cache nothing is reused or published; a worker may lose it while it runs.
    `give_way` makes an audit give up its slots and its row when a request finds none: whether
    there was one. They are free when no step in flight uses them.
    """

    give_way: Callable[[], bool]

    def __init__(
        self,
        manifest: StateManifest,
        sizes: Demand,
        limits: SchedulerLimits,
        prepare: Prepare = is_ready,
    ) -> None:
        self.manifest = manifest
        self.has_prefix_cache = limits.prefix_cache
        self._drafting = limits.drafting
        self.pools = Pools(sizes, prepare)
        self.prompt_ends = PromptEnds(self.pools)
        self.tree = PrefixTree.of(manifest, path_snapshots(sizes.get(Kind.RECURRENT, 0)))
        max_pages = -(-limits.max_len // manifest.page_size) + 1
        num_drafts = limits.drafting.num_tokens
        self.rows = RowTable(limits.concurrency.rows, max_pages, manifest.kinds, num_drafts)
        self._retired: deque[_Retired] = deque()
        self._submitted = 0
        self._committed = 0
        self.give_way = keeps_all

    # Steps, as far as they matter for ownership.

    def submitted(self, step_id: int) -> None:
        self._submitted = step_id

    def committed(self, step_id: int) -> None:
        """Gives back the slots that waited for this step."""
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

    # Taking slots: one transaction over all pools.

    def try_admit(
        self, waiting: PendingRequest, plan: ResumePlan, holder: Holder, headroom: int, now: float
    ) -> RunningSequence | None:
        """Pins reused state, evicts and allocates; or changes nothing and returns None.

        `headroom` further full pages must stay free, so that requests already running can grow.
        """
        if not self._has_row(holder):
            return None
        with ExitStack() as undo:  # an error on the way leaves no lease either
            pinned = self._pin(waiting.request, plan, holder, now, undo)
            taken = self.try_take(plan.demand, holder, headroom)
            if taken is None:
                return None
            for handles in taken.values():
                undo.callback(self.pools.release, handles, holder)
            row = self.rows.take()
            undo.callback(self.rows.give_back, row)
            sequence = self._settle(waiting, plan, taken, pinned, row)
            undo.pop_all()
        return sequence

    def _has_row(self, holder: Holder) -> bool:
        if not self.rows.num_free and holder.role is not Role.AUDIT:
            self.give_way()
        return bool(self.rows.num_free)

    def _proposals(self, waiting: PendingRequest) -> Proposals:
        return self._drafting.begin(waiting.request) if waiting.num_decoded else NOTHING_PROPOSED

    def try_take(
        self, demand: Demand, holder: Holder, headroom: int = 0
    ) -> dict[Kind, tuple[SlotHandle, ...]] | None:
        """Fresh slots of all kinds at once, after the eviction that they need; or None."""
        wanted = {k: n + (headroom if k is Kind.FULL else 0) for k, n in demand.items()}
        has_room = self._try_evict(self.pools.shortage(wanted))
        if not has_room and holder.role is not Role.AUDIT:
            has_room = self._try_make_room(wanted)
        return self.pools.try_allocate(demand, holder) if has_room else None

    def _try_make_room(self, wanted: Demand) -> bool:
        """Takes back what an audit holds, and then the ends of prompts, because the tree alone has
        too little."""
        lacks = self.pools.shortage(wanted)
        if self.give_way():
            lacks = self.pools.shortage(wanted)
            if self._try_evict(lacks):
                return True
        if not len(self.prompt_ends):
            return False
        idle = self.prompt_ends.num_idle()
        if not self._try_evict({kind: lack - idle[kind] for kind, lack in lacks.items()}):
            return False
        self.prompt_ends.drop_all()
        return True

    def _try_evict(self, lacks: Demand) -> bool:
        """Whether the tree could give up so many slots, of all pools or none: a demand that cannot
        be met costs no cache. Skips counts of 0 or less."""
        real = {kind: lack for kind, lack in lacks.items() if lack > 0}
        dropped = self.tree.try_evict(real, self._is_only_tree) if real else []
        if dropped is None:
            return False
        self.pools.release(dropped, TREE)
        return True

    def make_room(self, wanted: Demand) -> None:
        """Evicts as much of the shortage as it can."""
        for kind, lack in self.pools.shortage(wanted).items():
            self.pools.release(self.tree.evict(kind, lack, self._is_only_tree), TREE)

    def next_to_evict(self, kind: Kind) -> Iterator[PageKey]:
        """Keys in the order of eviction, without evicting."""
        return self.tree.next_to_evict(kind, self._is_only_tree)

    def drop_chain(self, first: PageKey, with_slots: Iterable[RunningSequence]) -> None:
        """Removes a first page, and all that stands on it, from the tree at once. It is no longer
        matched, and its slots become free when the last lease on them ends.

        Requests that use it go on with leases of their own, and publish nothing.
        """
        for sequence in with_slots:
            if sequence.anchor_pages and sequence.keys[0] == first:
                self._lease_anchored(sequence)
        # The newest first: for one request it has all the pages that an older one has.
        kept = [self._with_leases(retired, first) for retired in reversed(self._retired)]
        self._retired = deque(reversed(kept))
        if self.tree.match_depth((first,)):
            self.pools.release(self.tree.drop_chain(first), TREE)

    def _lease_anchored(self, sequence: RunningSequence) -> None:
        """The pages of its anchor become the request's own; nothing is copied."""
        anchor = sequence.keys[sequence.anchor_pages - 1]
        path = self._path(anchor)
        self.pools.lease(path, sequence.holder)
        if path:
            sequence.own[Kind.FULL].update(enumerate(path))
        self.tree.release(anchor)
        sequence.anchor_pages, sequence.is_doubtful = 0, True

    def _with_leases(self, retired: _Retired, first: PageKey) -> _Retired:
        """The same entry, with leases in place of holds on the chain of `first`."""
        slots, others = list(retired.slots), []
        for key in retired.held_keys:
            if self.tree.chain(key)[0] != first:
                others.append(key)
                continue
            holder = retired.holder
            path = [h for h in self._path(key) if holder not in self.pools[h.kind].holders(h)]
            self.pools.lease(path, holder)
            slots += path
            self.tree.release(key)
        return replace(retired, slots=tuple(slots), held_keys=tuple(others))

    def _path(self, key: PageKey) -> list[SlotHandle]:
        """The full pages up to and including this one; empty for a model without full pages."""
        if Kind.FULL not in self.manifest.kinds:
            return []
        return self.tree.slots_of(Kind.FULL, self.tree.chain(key))

    def _is_only_tree(self, handle: SlotHandle) -> bool:
        return self.pools[handle.kind].holders(handle) == (TREE,)

    def _pin(
        self, request: Request, plan: ResumePlan, holder: Holder, now: float, undo: ExitStack
    ) -> _Pinned:
        """Protects the reused path, and leases the window pages and the snapshot to be read."""
        keys = request.keys
        if plan.anchor_pages:
            anchor = keys[plan.anchor_pages - 1]
            self.tree.hold(anchor, now)
            undo.callback(self.tree.release, anchor)
        windows = [self.tree.slot(Kind.WINDOW, keys[page]) for page in plan.window_pages]
        source: tuple[SlotHandle, ...] = ()
        if isinstance(plan.initialiser, CopyState):
            self.tree.touch(plan.initialiser.key, now)
            source = (self.tree.slot(Kind.RECURRENT, plan.initialiser.key),)
        self._lease(windows, holder, undo)
        self._lease(source, slot_op_holder(request.request_id), undo)
        return _Pinned(holder, tuple(windows), source)

    def _lease(self, handles: Iterable[SlotHandle], holder: Holder, undo: ExitStack) -> None:
        for handle in handles:
            self.pools.lease((handle,), holder)
            undo.callback(self.pools.release, (handle,), holder)

    def _settle(
        self,
        waiting: PendingRequest,
        plan: ResumePlan,
        taken: dict[Kind, tuple[SlotHandle, ...]],
        pinned: _Pinned,
        row: int,
    ) -> RunningSequence:
        recurrent = list(taken.get(Kind.RECURRENT, ()))
        sequence = RunningSequence(
            waiting,
            plan,
            holder=pinned.holder,
            row=row,
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
        pages: dict[Kind, dict[int, SlotHandle]] = {}
        if Kind.FULL in taken:
            pages[Kind.FULL] = dict(enumerate(taken[Kind.FULL], start=plan.anchor_pages))
        if Kind.WINDOW in taken:
            pages[Kind.WINDOW] = dict(zip(plan.window_pages, windows, strict=True))
        return pages

    def _spread_windows(
        self, sequence: RunningSequence, plan: ResumePlan, fresh: Sequence[SlotHandle]
    ) -> None:
        """Gives window slots to the pages that are loaded or received first; the rest stay
        spare."""
        sequence.spare = list(fresh)
        for page in self._window_pages_to_fill(plan):
            sequence.own[Kind.WINDOW][page] = sequence.spare.pop()

    def _window_pages_to_fill(self, plan: ResumePlan) -> list[int]:
        loaded = [unit.page_index for unit in plan.loads if unit.kind is Kind.WINDOW]
        if plan.position < plan.prompt_len:
            return loaded
        window = resume_set(self.manifest, plan.position).window
        return [page for page in range(window.first, window.end) if page not in plan.window_pages]

    def _fill_row(self, sequence: RunningSequence) -> None:
        rows, row, plan = self.rows, sequence.row, sequence.plan
        rows.states[row, : 1 + len(sequence.scratch)] = [
            sequence.working_slot,
            *(handle.slot for handle in sequence.scratch),
        ]
        rows.positions[row] = plan.position
        rows.adapters[row] = sequence.request.adapter.number
        if plan.anchor_pages and Kind.FULL in self.manifest.kinds:
            path = self.tree.slots_of(Kind.FULL, sequence.keys[: plan.anchor_pages])
            rows.set_pages(Kind.FULL, row, 0, [handle.slot for handle in path])
        for kind, pages in sequence.own.items():
            for page, handle in pages.items():
                rows.set_page(kind, row, page, handle.slot)

    # Giving slots back.

    def leave(self, sequence: RunningSequence) -> None:
        """Gives back everything that a request still holds, once no step in flight uses it."""
        self.release_copy_source(sequence)
        anchor = sequence.anchor_pages
        held = (sequence.keys[anchor - 1],) if anchor else ()
        self.retire(sequence.slots(), sequence.holder, held, (sequence.row,))

    def release_copy_source(self, sequence: RunningSequence) -> None:
        """Ends the lease on the source of a copy after the step that copies it."""
        source, sequence.copy_source = sequence.copy_source, ()
        if source:
            self.retire(source, slot_op_holder(sequence.request_id))

    def reclaim(self, sequence: RunningSequence) -> None:
        """Gives back every lease in the name of a request that failed half-way, recorded in the
        request or not."""
        anchor = sequence.anchor_pages
        held = (sequence.keys[anchor - 1],) if anchor else ()
        self.retire((), sequence.holder, held, (sequence.row,))
        for holder in _holders_of(sequence):
            retired = [entry for entry in self._retired if entry.holder == holder]
            going = {slot for entry in retired for slot in entry.slots}
            leased = (handle for handle, lessee in self.pools.leases() if lessee == holder)
            self.retire([handle for handle in leased if handle not in going], holder)

    def check_integrity(self, with_slots: Iterable[RunningSequence]) -> None:
        """Raises AssertionError unless pools, tree, rows and the requests `with_slots` agree."""
        self.pools.check_integrity()
        self.tree.check_integrity()
        sequences, leases = list(with_slots), list(self.pools.leases())
        frozen = sorted(handle for handle, holder in leases if holder == PROMPT_END)
        assert frozen == sorted(self.prompt_ends.handles()), "a frozen slot is lost"
        in_tree = {handle for handle, holder in leases if holder == TREE}
        assert in_tree == set(self.tree.handles()), "the tree's slots are not those leased to it"
        expected = {holder for sequence in sequences for holder in _holders_of(sequence)}
        expected |= {retired.holder for retired in self._retired}
        owned = (Role.REQUEST, Role.SLOT_OP)
        strays = {holder for _, holder in leases if holder.role in owned} - expected
        assert not strays, f"slots are leased to requests that are not here: {sorted(strays)}"
        holds = Counter(key for retired in self._retired for key in retired.held_keys)
        holds.update(s.keys[s.anchor_pages - 1] for s in sequences if s.anchor_pages)
        assert self.tree.holds() == holds, "pages are held that no request stands on"
        num_rows = len(sequences) + sum(len(retired.rows) for retired in self._retired)
        assert num_rows + self.rows.num_free == len(self.rows.positions), "a row is lost"


def _holders_of(sequence: RunningSequence) -> tuple[Holder, ...]:
    """The holders of a request's slots: its own, and a transfer's until it is adopted."""
    owner = Holder(Role.REQUEST, sequence.request_id)
    return tuple({sequence.holder: 0, owner: 0, slot_op_holder(sequence.request_id): 0})
