"""Loads run beside the steps in front of them, before their own step, once, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from mmap import PAGESIZE, mmap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.doubles.fake_engine import FakeEngine, WrongStamp, no_delay
from tests.doubles.stamps import fake_manifest, fake_tokens
from tests.engine.plans import Guest, decode, full_pages, load, prefill, with_snapshots
from tests.harness.pair import worker_options
from tests.native import native_config, save_native

from ferryman.cache.keys import as_token_ids
from ferryman.cache.manifest import Kind
from ferryman.engine.engine import build_engine
from ferryman.engine.memory.copy_stream import CopyStream
from ferryman.engine.memory.loads import NO_LOADS, LoadedUnits, LoadQueue
from ferryman.engine.memory.transfer import HostTransfer, digest_of
from ferryman.engine.stream import ForwardStream, StreamClosed, StreamPoisoned
from ferryman.errors import QueueFull
from ferryman.schedule.batch import PrefillStep, RowSeed, SlotLoad, SlotOps, StepPlan

PAGE = 4
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
SIZES = {Kind.FULL: 24, Kind.RECURRENT: 12}
ANNA = Guest("anna", PROMPT, row=0, working_slot=2, pages=full_pages(7, 3, 5))


def passes(_: int) -> None:
    """Lets loads run without a delay."""


class HeldTransfer(HostTransfer):
    """Says which slots are being loaded, and loads when `gate` returns."""

    def __init__(self, engine: FakeEngine, gate: Callable[[int], None]) -> None:
        super().__init__(engine.slabs)
        self._gate = gate
        self.loading: list[int] = []
        self.began = threading.Event()

    def load_unit(self, kind: Kind, slot: int, arena: memoryview, digest: bytes) -> None:
        self.loading.append(slot)
        self.began.set()
        self._gate(slot)
        super().load_unit(kind, slot, arena, digest)


@dataclass
class CopyHouse:
    """An engine with both streams, and the arena with another engine's state."""

    pace: Callable[[StepPlan], None] = no_delay
    gate: Callable[[int], None] = passes
    depth: int = 64
    arena: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self.engine = FakeEngine(fake_manifest(PAGE), SIZES, max_rows=4, max_len=40, pace=self.pace)
        self.transfer = HeldTransfer(self.engine, self.gate)
        self.copies = CopyStream(depth=self.depth)
        self.engine.host_tier = LoadQueue(self.transfer, self.copies)
        self.forward = ForwardStream(self.engine)
        self.units = self._store()
        self.engine.host_tier.attach(memoryview(self.arena))

    def _store(self) -> list[tuple[Kind, int, bytes]]:
        """The resume set of position 8, as another worker wrote it through."""
        writer = FakeEngine(fake_manifest(PAGE), SIZES, max_rows=1, max_len=40)
        writer.run(with_snapshots(prefill(0, [(ANNA, 0, 10)], SlotOps(clears=(2,))), (8, 6)))
        found = []
        for kind, slot in ((Kind.FULL, 7), (Kind.FULL, 3), (Kind.RECURRENT, 6)):
            content = bytes(writer.transfer.read(kind, slot))
            found.append((kind, len(self.arena), content))
            self.arena += content
        return found

    def resume(self, step_id: int, guest: Guest) -> PrefillStep:
        """A step that loads positions 0 to 8 for a guest and computes the rest."""
        slots = (*guest.pages[Kind.FULL][:2], guest.working_slot)
        loads = tuple(
            load(guest, kind, slot, offset, content, digest_of(content))
            for (kind, offset, content), slot in zip(self.units, slots, strict=True)
        )
        seeds = (RowSeed(guest.row, as_token_ids(PROMPT[:8])),)
        return prefill(step_id, [(guest, 8, 10)], SlotOps(loads=loads, seeds=seeds))

    def close(self) -> None:
        self.forward.close()
        self.copies.close()


@contextmanager
def open_house(
    pace: Callable[[StepPlan], None] = no_delay,
    gate: Callable[[int], None] = passes,
    depth: int = 64,
) -> Iterator[CopyHouse]:
    house = CopyHouse(pace, gate, depth)
    yield house
    house.close()


def guest(index: int) -> Guest:
    pages = full_pages(*range(12 + 3 * index, 15 + 3 * index))
    return Guest(f"guest {index}", PROMPT, row=1 + index, working_slot=7 + index, pages=pages)


BERT = guest(0)
EXPECTED = fake_tokens(PROMPT, 1, 1000)


def wait_for(event: threading.Event) -> None:
    assert event.wait(60)


def test_loads_run_while_the_step_in_front_of_them_has_not_begun() -> None:
    first = threading.Event()
    with open_house(pace=lambda plan: wait_for(first) if plan.step_id == 0 else None) as house:
        cold = house.forward.submit(prefill(0, [(ANNA, 0, 10)], SlotOps(clears=(2,))))
        warm = house.forward.submit(house.resume(1, BERT))
        house.copies.submit(lambda: None).result(60)
        assert house.transfer.loading == [12, 13, 7], "all of them, and step 0 stands still"
        assert not cold.done()
        first.set()
        assert [step.result(60).sampled[0].token_id for step in (cold, warm)] == EXPECTED * 2
        assert warm.result(60).loaded.num_bytes == len(house.arena)
        assert cold.result(60).loaded.num_bytes == 0


def test_a_step_waits_for_its_loads_however_late_they_are() -> None:
    launching, may_load = threading.Event(), threading.Event()
    with open_house(lambda plan: launching.set(), lambda slot: wait_for(may_load)) as house:
        step = house.forward.submit(house.resume(0, BERT))
        wait_for(launching)
        wait_for(house.transfer.began)
        assert not step.done()
        may_load.set()
        assert step.result(60).sampled[0].token_id == EXPECTED[0]


class Impatient(LoadQueue):
    """The planted defect: a launch that does not wait for its loads."""

    def arrived(self, step_id: int, loads: object) -> LoadedUnits:
        return NO_LOADS


def test_a_step_that_did_not_wait_for_its_loads_is_seen_to_be_wrong() -> None:
    may_load = threading.Event()
    with open_house(gate=lambda slot: wait_for(may_load)) as house:
        house.engine.host_tier = Impatient(house.transfer, house.copies)
        house.engine.host_tier._arena = memoryview(house.arena)
        step = house.forward.submit(house.resume(0, BERT))
        with pytest.raises(WrongStamp, match="guest 0: full slot 12 does not hold"):
            step.result(60)
        assert house.transfer.loading in ([], [12]), "none has ended; the first may not have begun"
        may_load.set()


def test_a_plan_that_is_submitted_again_loads_nothing() -> None:
    """Defect 3, on the copy stream."""
    with open_house() as house:
        plan = house.resume(0, BERT)
        house.forward.submit(plan).result(60)
        with pytest.raises(WrongStamp, match=r"of position 10, not .* of position 8"):
            house.forward.submit(plan).result(60)
        house.copies.submit(lambda: None).result(60)
        assert len(house.transfer.loading) == 3


def test_a_step_that_is_run_without_having_been_begun_loads_then() -> None:
    with open_house() as house:
        outcome = house.engine.run(house.resume(0, BERT))
        assert outcome.sampled[0].token_id == EXPECTED[0]
        assert len(house.transfer.loading) == 3


def test_corrupt_bytes_are_told_of_their_request_and_of_no_other() -> None:
    with open_house() as house:
        house.arena[house.units[1][1]] ^= 1
        bad = house.resume(0, BERT)
        good = prefill(0, [(ANNA, 0, 10)], SlotOps(clears=(2,)))
        both = replace(
            bad,
            ops=replace(bad.ops, clears=(2,)),
            chunks=(*bad.chunks, *good.chunks),
            page_tables=prefill(0, [(BERT, 8, 10), (ANNA, 0, 10)]).page_tables,
        )
        outcome = house.forward.submit(both).result(60)
        assert outcome.corrupt == ("guest 0",)
        assert outcome.sampled[1].token_id == EXPECTED[0]
        assert outcome.loaded.num_bytes == len(house.arena) - len(house.units[1][2])


def test_a_load_that_fails_poisons_its_step_and_what_comes_after() -> None:
    with open_house() as house:
        plan = house.resume(1, BERT)
        nowhere = SlotLoad("guest 0", plan.ops.loads[0].unit, dst=99)
        hold = threading.Event()
        house.forward.call(lambda: wait_for(hold))
        before = house.forward.submit(prefill(0, [(ANNA, 0, 10)], SlotOps(clears=(2,))))
        broken = house.forward.submit(replace(plan, ops=replace(plan.ops, loads=(nowhere,))))
        after = house.forward.submit(decode(2, [(ANNA, 10)]))
        hold.set()
        assert before.result(60).sampled[0].token_id == EXPECTED[0]
        with pytest.raises(IndexError, match="no slot 99"):
            broken.result(60)
        with pytest.raises(StreamPoisoned, match="no slot 99"):
            after.result(60)
        begun = len(house.transfer.loading)
        with pytest.raises(StreamPoisoned):
            house.forward.submit(house.resume(3, BERT))
        assert len(house.transfer.loading) == begun, "a poisoned stream begins no loads"


def test_a_full_copy_stream_refuses_and_nothing_of_the_step_is_queued() -> None:
    may_load = threading.Event()
    with open_house(gate=lambda slot: wait_for(may_load), depth=1) as house:
        first = house.forward.submit(house.resume(0, BERT))
        wait_for(house.transfer.began)
        second = house.forward.submit(house.resume(1, guest(1)))
        with pytest.raises(QueueFull, match="1 jobs wait on the copy stream"):
            house.forward.submit(house.resume(2, guest(2)))
        may_load.set()
        assert [step.result(60).sampled[0].token_id for step in (first, second)] == EXPECTED * 2
        third = house.forward.submit(house.resume(2, guest(2)))
        assert third.result(60).sampled[0].token_id == EXPECTED[0]
        assert len(house.transfer.loading) == 9


def test_an_arena_is_exchanged_behind_the_loads_that_read_it() -> None:
    may_load, attached = threading.Event(), threading.Event()
    with open_house(gate=lambda slot: wait_for(may_load)) as house:
        step = house.forward.submit(house.resume(0, BERT))

        def attach() -> None:
            house.engine.host_tier.attach(memoryview(b""))
            attached.set()

        thread = threading.Thread(target=attach)
        thread.start()
        wait_for(house.transfer.began)
        assert not attached.is_set()
        may_load.set()
        thread.join(60)
        assert step.result(60).corrupt == ()
        late = house.forward.submit(house.resume(1, guest(1)))
        assert late.result(60).corrupt == ("guest 1",)


def test_closing_runs_what_was_submitted_and_joins() -> None:
    ran: list[int] = []
    copies = CopyStream()
    futures = [copies.submit(lambda index=index: ran.append(index)) for index in range(5)]  # type: ignore[misc]
    copies.close()
    copies.close()
    assert ran == [0, 1, 2, 3, 4]
    assert all(future.done() for future in futures)
    assert "copy-stream" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(StreamClosed, match="the copy stream is closed"):
        copies.submit(lambda: None)


NUM_STEPS = 3
GATES = st.permutations(
    [("step", index) for index in range(NUM_STEPS)]
    + [("load", index) for index in range(NUM_STEPS)]
)


@settings(max_examples=30, deadline=None)
@given(GATES)
def test_in_whatever_order_loads_and_steps_may_go_on_every_state_is_right(
    order: list[tuple[str, int]],
) -> None:
    gates = {name: threading.Event() for name in order}
    guests = [guest(index) for index in range(NUM_STEPS)]
    owner = {
        slot: i for i, g in enumerate(guests) for slot in (*g.pages[Kind.FULL], g.working_slot)
    }
    with open_house(
        pace=lambda plan: wait_for(gates["step", plan.step_id]),
        gate=lambda slot: wait_for(gates["load", owner[slot]]),
    ) as house:
        steps = [house.forward.submit(house.resume(i, one)) for i, one in enumerate(guests)]
        for name in order:
            gates[name].set()
        assert [step.result(60).sampled[0].token_id for step in steps] == EXPECTED * NUM_STEPS
        assert len(house.transfer.loading) == 3 * NUM_STEPS


def test_an_engine_that_ends_lets_go_of_its_arena(tmp_path: Path) -> None:
    folder = save_native(tmp_path, native_config())
    arena = mmap(-1, PAGESIZE)
    with build_engine(worker_options(folder)) as engine:
        engine.host_tier.attach(memoryview(arena))
        with pytest.raises(BufferError):
            arena.close()
    arena.close()
