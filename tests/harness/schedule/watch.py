"""A worker that is checked: after every step its claims must be true.

budget        the prompts of a step have no more tokens together than its limit
chunks        a chunk has the tokens of its span, and scores those after each if that is asked for
books         the ledger has exactly the holders that claim a slot
tree          every cached unit holds the state of the prefix that its key names
initialisers  a working slot gets its first state once in each generation, or was written before
              as a scratch slot behind a draft
endings       a request that has ended has no more events
in flight     no slot that a step in flight names is free
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Unpack

import numpy as np
from tests.doubles.stamps import extended
from tests.harness.schedule.worker import PAGE, SIZES, ScheduledWorker, ScheduleOptions

from ferryman.cache.keys import PageKey, page_keys, root_key
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.prompt_ends import PROMPT_END
from ferryman.cache.resume import ReceiveState
from ferryman.cache.slots import TREE, Demand, Holder, Role, SlotHandle, SlotPool
from ferryman.engine.ops import advanced_slots_of, snapshots_of
from ferryman.schedule.batch import AuditStep, DecodeStep, PureStep, StepPlan, halves_of
from ferryman.schedule.events import AuditDone, AuditOpened, AuditReady, Cached, Finished, LoadsDone
from ferryman.schedule.limits import MIXED_SHARE, PREFILL_FIRST, TOGETHER
from ferryman.schedule.sequence import RunningSequence
from ferryman.schedule.slot_allocator import slot_op_holder

Holders = dict[SlotHandle, list[Holder]]

BESIDE = (Role.TRANSFER_OUT, Role.STORE)
"""Roles that hold slots without the schedule, so its claims do not include them."""


class CountingPool(SlotPool):
    """Counts how often each generation of a slot became free."""

    def __init__(self, kind: Kind, num_slots: int) -> None:
        super().__init__(kind, num_slots)
        self.freed: Counter[SlotHandle] = Counter()

    def release(self, handle: SlotHandle, holder: Holder) -> bool:
        is_free = super().release(handle, holder)
        self.freed[handle] += is_free
        return is_free


class WatchedWorker(ScheduledWorker):
    """Fails at the first step after which something is not as it must be."""

    def __init__(
        self, manifest: StateManifest, sizes: Demand = SIZES, **options: Unpack[ScheduleOptions]
    ) -> None:
        super().__init__(manifest, sizes, **options)
        pools = self.scheduler.allocator.pools.by_kind
        self.pools = {kind: CountingPool(kind, pools[kind].num_slots) for kind in pools}
        pools.update(self.pools)
        self.initialised: Counter[SlotHandle] = Counter()
        self.behind_drafts: set[SlotHandle] = set()
        self.shared: set[SlotHandle | None] = set()
        self.prefixes: dict[PageKey, tuple[int, ...]] = {}
        self.ended: set[str] = set()
        self._num_heard = 0

    def plan(self) -> bool:
        before, decoding = len(self.queued), list(self.scheduler.sequences.decoding)
        planned = super().plan()
        # Planning may push some of them back, and prompts that end join them.
        num_decoding = sum(s in self.scheduler.sequences.decoding for s in decoding)
        for plan in list(self.queued)[before:]:
            for half in halves_of(plan):
                self._check_budget(half, num_decoding)
                self._check_chunks(half)
                self._check_initialisers(half)
        return planned

    def _check_budget(self, plan: PureStep, num_decoding: int) -> None:
        """The prompts of a step share one budget, which those that decode lessen."""
        if isinstance(plan, DecodeStep):
            return
        limits, num_tokens = self.scheduler.limits, sum(c.end - c.start for c in plan.chunks)
        left = limits.chunk_tokens
        if limits.order is not PREFILL_FIRST and not isinstance(plan, AuditStep):
            if limits.order is TOGETHER and num_decoding:
                left //= MIXED_SHARE
            left = max(self.manifest.scan_chunk, left - num_decoding)
        # A piece of the grid is computed whole, however small the budget is.
        most = max(left, self.manifest.scan_chunk)
        assert num_tokens <= most, f"step {plan.step_id} has {num_tokens} tokens of {most}"

    def _check_chunks(self, plan: PureStep) -> None:
        for chunk in () if isinstance(plan, DecodeStep | AuditStep) else plan.chunks:
            asked = self.scheduler.sequences.running(chunk.request_id).request
            tokens = asked.token_ids.tolist()
            assert chunk.token_ids.tolist() == tokens[chunk.start : chunk.end]
            after = tokens[chunk.start + 1 : chunk.end + 1]
            is_scored = asked.sampling.prompt_logprobs is not None and after
            scored = [(score.first, score.token_ids.tolist()) for score in chunk.scores]
            assert scored == ([(chunk.start + 1, after)] if is_scored else [])

    def collect(self) -> None:
        super().collect()
        self._check_endings()
        check_books(self)
        self._check_tree()
        for plan in self.queued:
            self._check_in_flight(plan)

    def _check_initialisers(self, plan: PureStep) -> None:
        ops, now = plan.ops, self.scheduler.allocator.pools
        copied = [copy.dst for copy in ops.copies if copy.kind is Kind.RECURRENT]
        named = [*ops.clears, *copied]
        named += [load.dst for load in ops.loads if load.unit.kind is Kind.RECURRENT]
        self.initialised.update(current(now[Kind.RECURRENT], slot) for slot in named)
        if isinstance(plan, DecodeStep):  # instead of being received
            self.shared.update(current(now[Kind.RECURRENT], slot) for slot in copied)
        received = {
            sequence.working
            for sequence in self.scheduler.sequences.by_id.values()
            if isinstance(sequence.plan.initialiser, ReceiveState)
        } - self.shared
        for slot in _entered(plan):
            if slot >= 0:
                handle = current(now[Kind.RECURRENT], slot)
                times = self.initialised[handle] + (handle in received)
                is_right = times == 1 or (times == 0 and handle in self.behind_drafts)
                assert is_right, f"{handle} was given a first state {times} times"
        if isinstance(plan, DecodeStep):
            drafted = plan.write_slots[plan.verify_depths[0] :].tolist()
            self.behind_drafts |= {current(now[Kind.RECURRENT], s) for s in drafted if s >= 0}

    def _check_endings(self) -> None:
        """A request that has ended has no more events."""
        for event in self.events[self._num_heard :]:
            # The first two are about slots, and audits begin where a request ends.
            passes = isinstance(event, Cached | LoadsDone | AuditOpened | AuditReady | AuditDone)
            assert passes or event.request_id not in self.ended, event
            if isinstance(event, Finished):
                self.ended.add(event.request_id)
        self._num_heard = len(self.events)

    def _check_in_flight(self, plan: StepPlan) -> None:
        """A free slot may get a new writer at once, so no step in flight may name one."""
        states = {snapshot.dst for snapshot in snapshots_of(plan)} | set(advanced_slots_of(plan))
        named: dict[Kind, set[int]] = defaultdict(set)
        for half in halves_of(plan):
            for kind, table in half.page_tables.items():
                named[kind] |= set(table.ravel().tolist())
        if Kind.RECURRENT in self.pools:
            named[Kind.RECURRENT] = states
        for copy in plan.ops.copies:
            named[copy.kind] |= {copy.src, copy.dst}
        for kind, slots in named.items():
            freed = slots & set(self.pools[kind]._free)
            assert not freed, f"{kind} slots {freed} are free, and step {plan.step_id} names them"

    def _check_tree(self) -> None:
        self._name_prefixes()
        tree = self.scheduler.allocator.tree
        for kind, key in tree.units():
            token_ids = self.prefixes[key]
            hashes = extended(0, token_ids)
            slot = tree.slot(kind, key).slot
            found = self.engine.slabs.stamps(kind)[slot].tolist()
            if kind is Kind.RECURRENT:
                assert found[:2] == [hashes[-1], len(token_ids)], "a state under another length"
            else:
                assert found[:PAGE] == hashes[-PAGE:], f"{kind} page of another prefix"

    def _name_prefixes(self) -> None:
        for request_id, asked in self.requests.items():
            tokens = [*asked.token_ids.tolist(), *self.tokens[request_id]]
            root = root_key(self.manifest, asked.tenant_salt)
            keys = page_keys(root, np.array(tokens, dtype="<u4"), PAGE)
            for page, key in enumerate(keys):
                self.prefixes.setdefault(key, tuple(tokens[: (page + 1) * PAGE]))


def _entered(plan: PureStep) -> list[int]:
    """The states that requests bring into a step; those behind drafts come about in it."""
    if isinstance(plan, DecodeStep):
        return [int(slot) for slot in plan.read_slots[: plan.verify_depths[0]]]
    return [chunk.working_slot for chunk in plan.chunks]


def current(pool: SlotPool, slot: int) -> SlotHandle:
    """The slot as of its newest allocation."""
    return SlotHandle(pool.kind, slot, pool._generations[slot])


def books(worker: ScheduledWorker) -> Holders:
    """Every leased slot of the pools with its holders, in a fixed order."""
    return {
        current(pool, slot): sorted(holders)
        for pool in worker.scheduler.allocator.pools.by_kind.values()
        for slot, holders in enumerate(pool._holders)
        if holders
    }


def check_books(worker: ScheduledWorker) -> None:
    """Compares the ledger with a recount from the other side: from the holders' claims."""
    said: Holders = defaultdict(list)
    for handle, holder in _claims(worker):
        said[handle].append(holder)
    found = {
        handle: [holder for holder in holders if holder.role not in BESIDE]
        for handle, holders in books(worker).items()
    }
    assert {handle: sorted(holders) for handle, holders in said.items()} == {
        handle: holders for handle, holders in found.items() if holders
    }


def _claims(worker: ScheduledWorker) -> Iterator[tuple[SlotHandle, Holder]]:
    scheduler = worker.scheduler
    yield from ((handle, TREE) for handle in scheduler.allocator.tree.handles())
    yield from ((handle, PROMPT_END) for handle in scheduler.allocator.prompt_ends.handles())
    for sequence in (*scheduler.sequences.by_id.values(), *scheduler.sequences.reserved.values()):
        yield from _claims_of(sequence)
    yield from scheduler.audits.leases()
    for retired in scheduler.allocator._retired:
        yield from ((handle, retired.holder) for handle in retired.slots)


def _claims_of(sequence: RunningSequence) -> Iterator[tuple[SlotHandle, Holder]]:
    yield from ((handle, sequence.holder) for handle in sequence.slots())
    source = slot_op_holder(sequence.request_id)
    yield from ((handle, source) for handle in sequence.copy_source)


def is_all_cached(worker: ScheduledWorker) -> bool:
    """Whether only the tree holds slots."""
    return all(set(ledger.by_role) <= {"tree"} for ledger in worker.scheduler.ledgers().values())
