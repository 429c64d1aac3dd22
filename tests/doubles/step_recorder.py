"""Wraps the forward stream and transfers, so that the sanitizer sees all their uses of slots.

A plan's operations are recorded when it is submitted, with the generations that the scheduler
meant. The stream runs them in the order of submission, so the recorded order is theirs. Edges:

    scheduler   plan k ──'plan k'──┬──────────────────────────────────► commit k
    copies                         ├─► loads of k ──'loads k'──┐            ▲
    forward                        └───────────────────────────┴─► step k ──┘ 'step k'
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace

from tests.doubles.sanitizer import Operation, Recorder
from tests.doubles.step_parts import NOWHERE, StepPart, parts_of

from ferryman.cache.manifest import Kind
from ferryman.cache.slots import SlotHandle, SlotPart
from ferryman.engine.memory.pinned_pieces import TakePiece
from ferryman.engine.memory.transfer import Landed, Transfer, ignored
from ferryman.engine.ops import OnceOnly
from ferryman.engine.stream import ForwardStream
from ferryman.schedule.batch import SlotOps, SlotSnapshot, StepOutcome, StepPlan

FORWARD = "forward"
COPIES = "copies"
SCHEDULER = "scheduler"

HandleOf = Callable[[Kind, int], SlotHandle]


def plan_event(step_id: int) -> str:
    """The event that the scheduler records when it submits a step."""
    return f"plan {step_id}"


def loads_event(step_id: int) -> str:
    """The event that the copy stream records after the loads of a step: their fence."""
    return f"loads {step_id}"


def step_event(step_id: int) -> str:
    """The event that a step records at its end."""
    return f"step {step_id}"


class StepRecorder:
    """Records the slot operations of plans. `handle_of` gives a slot's present generation."""

    def __init__(self, recorder: Recorder, handle_of: HandleOf, *, page_size: int) -> None:
        self._recorder = recorder
        self._handle_of = handle_of
        self._page_size = page_size
        self._once = OnceOnly()

    def planned(self, plan: StepPlan) -> None:
        """Records that the scheduler submits this plan."""
        planned = plan_event(plan.step_id)
        self._recorder.add(Operation(SCHEDULER, planned, records=(planned,)))
        self._recorder.add(*self.operations(self._once.consume(plan)))

    def committed(self, step_id: int) -> None:
        """Records that the scheduler has the step's outcome."""
        waits = (step_event(step_id),)
        self._recorder.add(Operation(SCHEDULER, f"commit {step_id}", waits=waits))

    def freed(self, handles: Iterable[SlotHandle]) -> None:
        """Records that the scheduler freed these slots."""
        self._recorder.add(Operation(SCHEDULER, "free", frees=tuple(handles)))

    def operations(self, plan: StepPlan) -> tuple[Operation, ...]:
        """The plan's slot operations: loads on the copy stream, all others on the forward
        stream."""
        planned, loaded = plan_event(plan.step_id), loads_event(plan.step_id)
        loads = list(self._loads(plan.ops))
        step = [
            *self._prologue(plan.ops),
            *self._forward(plan),
            *self._frozen("snapshot", plan.ops.snapshots),
        ]
        if loads:
            loads[0] = replace(loads[0], waits=(planned,))
            loads[-1] = replace(loads[-1], records=(loaded,))
        step[0] = replace(step[0], waits=(planned, loaded) if loads else (planned,))
        step[-1] = replace(step[-1], records=(step_event(plan.step_id),))
        return tuple(replace(op, name=f"{op.name} of step {plan.step_id}") for op in loads + step)

    def _loads(self, ops: SlotOps) -> Iterator[Operation]:
        for load in ops.loads:
            dst = self._handle_of(load.unit.kind, load.dst)
            yield Operation(COPIES, f"load for {load.request_id}", initialises=(dst,))

    def _prologue(self, ops: SlotOps) -> Iterator[Operation]:
        for copy in ops.copies:
            src, dst = (self._handle_of(copy.kind, slot) for slot in (copy.src, copy.dst))
            yield Operation(FORWARD, "copy", reads=(src,), initialises=(dst,))
        for slot in ops.clears:
            yield Operation(FORWARD, "clear", initialises=(self._recurrent(slot),))
        yield from self._frozen("save", ops.saves)

    def _forward(self, plan: StepPlan) -> Iterator[Operation]:
        for part in parts_of(plan):
            reads, writes = self._pages(part)
            if part.write_slot != NOWHERE:
                reads.append(self._recurrent(part.read_slot))
                writes.append(self._recurrent(part.write_slot))
            frozen = tuple(self._recurrent(snapshot.dst) for snapshot in part.snapshots)
            name = f"forward of {part.request_id}"
            yield Operation(FORWARD, name, tuple(reads), tuple(writes), frozen)

    def _frozen(self, name: str, snapshots: Iterable[SlotSnapshot]) -> Iterator[Operation]:
        for snapshot in snapshots:
            src, dst = self._recurrent(snapshot.src), self._recurrent(snapshot.dst)
            # Not an initialiser: a track slot is overwritten at every second page's end.
            yield Operation(FORWARD, name, reads=(src,), writes=(dst,))

    def _pages(self, part: StepPart) -> tuple[list[SlotHandle], list[SlotHandle]]:
        first, end = part.start // self._page_size, -(-part.end // self._page_size)
        reads, writes = [], []
        for kind, table in part.tables.items():
            slots = [(index, slot) for index, slot in enumerate(table[:end].tolist()) if slot >= 0]
            reads += [self._handle_of(kind, slot) for _, slot in slots]
            writes += [self._handle_of(kind, slot) for index, slot in slots if index >= first]
        return reads, writes

    def _recurrent(self, slot: int) -> SlotHandle:
        return self._handle_of(Kind.RECURRENT, slot)


class RecordingStream(StepRecorder):
    """A forward stream that records plans when they are submitted."""

    def __init__(
        self, stream: ForwardStream, recorder: Recorder, handle_of: HandleOf, *, page_size: int
    ) -> None:
        super().__init__(recorder, handle_of, page_size=page_size)
        self._stream = stream

    def submit(self, plan: StepPlan) -> Future[StepOutcome]:
        self.planned(plan)
        return self._stream.submit(plan)

    async def run(self, plan: StepPlan) -> StepOutcome:
        outcome = await asyncio.wrap_future(self.submit(plan))
        self.committed(outcome.step_id)
        return outcome


class RecordingTransfer:
    """A transfer that records its reads and writes as those of `stream`."""

    def __init__(
        self,
        transfer: Transfer,
        recorder: Recorder,
        handle_of: HandleOf,
        *,
        stream: str = SCHEDULER,
        waits: tuple[str, ...] = (),
    ) -> None:
        self._transfer = transfer
        self._recorder = recorder
        self._handle_of = handle_of
        self._stream = stream
        self._waits = waits
        self.is_in_place = transfer.is_in_place

    def after(self, *events: str) -> RecordingTransfer:
        """The same transfer; its operations wait for these events first."""
        return RecordingTransfer(
            self._transfer, self._recorder, self._handle_of, stream=self._stream, waits=events
        )

    def read(self, kind: Kind, slot: int) -> memoryview:
        self._reads("read", kind, slot)
        return self._transfer.read(kind, slot)

    def read_parts(self, parts: Sequence[SlotPart], take: TakePiece) -> None:
        for part in parts:
            self._reads("read", part.kind, part.slot)
        self._transfer.read_parts(parts, take)

    def write(
        self,
        kind: Kind,
        slot: int,
        offset: int,
        content: bytes | memoryview,
        landed: Landed = ignored,
    ) -> None:
        self._add(Operation(self._stream, "write", writes=(self._handle_of(kind, slot),)))
        self._transfer.write(kind, slot, offset, content, landed)

    def digest(self, kind: Kind, slot: int) -> bytes:
        self._reads("digest", kind, slot)
        return self._transfer.digest(kind, slot)

    def store_unit(self, kind: Kind, slot: int, arena: memoryview) -> bytes:
        self._reads("store", kind, slot)
        return self._transfer.store_unit(kind, slot, arena)

    def load_unit(self, kind: Kind, slot: int, arena: memoryview, digest: bytes) -> None:
        self._add(Operation(self._stream, "load", initialises=(self._handle_of(kind, slot),)))
        self._transfer.load_unit(kind, slot, arena, digest)

    def _reads(self, name: str, kind: Kind, slot: int) -> None:
        self._add(Operation(self._stream, name, reads=(self._handle_of(kind, slot),)))

    def _add(self, operation: Operation) -> None:
        self._recorder.add(replace(operation, waits=self._waits))
