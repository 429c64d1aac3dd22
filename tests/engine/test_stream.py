"""The forward stream: order, overlap, failure, end. Everything waits on events, nothing on time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.doubles.fake_engine import FakeEngine
from tests.doubles.stamps import extended, fake_manifest, fake_tokens
from tests.engine.plans import Guest, decode, full_pages, prefill

from ferryman.cache.manifest import Kind
from ferryman.engine.stream import ForwardStream, StreamClosed, StreamPoisoned
from ferryman.errors import QueueFull
from ferryman.schedule.batch import DecodeStep, SlotOps, SlotSnapshot, StepOutcome, StepPlan

PAGE = 4
ANNA = Guest("anna", [3, 1, 4, 1, 5, 9], row=0, working_slot=2, pages=full_pages(7, 3, 5))


def empty_step(step_id: int) -> DecodeStep:
    return decode(step_id, [(ANNA, step_id)])


class RecordingEngine:
    """Writes down the order of launches; a step's values arrive when the test says so."""

    def __init__(self, num_steps: int) -> None:
        self.launched: list[int] = []
        self.was_launched = [threading.Event() for _ in range(num_steps)]
        self.arrived = [threading.Event() for _ in range(num_steps)]
        self.fails: set[int] = set()

    def begin(self, plan: StepPlan) -> None:
        """These steps load nothing."""

    def launch(self, plan: StepPlan) -> Later:
        if plan.step_id in self.fails:
            raise ValueError(f"no step {plan.step_id}")
        self.launched.append(plan.step_id)
        self.was_launched[plan.step_id].set()
        return Later(plan.step_id, self.arrived[plan.step_id])


class Later:
    """A step whose values arrive with an event."""

    def __init__(self, step_id: int, arrived: threading.Event) -> None:
        self._step_id = step_id
        self._arrived = arrived

    def is_ready(self) -> bool:
        return self._arrived.is_set()

    def outcome(self) -> StepOutcome:
        assert self._arrived.wait(60)
        return StepOutcome(self._step_id, ())


def test_a_step_is_launched_while_the_one_before_has_no_values_yet() -> None:
    engine = RecordingEngine(3)
    with ForwardStream(engine) as stream:
        futures = [stream.submit(empty_step(i)) for i in range(3)]
        assert engine.was_launched[2].wait(60)
        assert not any(future.done() for future in futures)
        # Values that arrive out of order are still told in order.
        engine.arrived[1].set()
        assert not futures[1].done()
        engine.arrived[0].set()
        assert futures[1].result(60).step_id == 1
        engine.arrived[2].set()
        assert futures[2].result(60).step_id == 2
    assert engine.launched == [0, 1, 2]


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 12).flatmap(lambda count: st.permutations(range(count))))
def test_whatever_the_order_of_arrivals_steps_and_calls_run_in_the_order_of_submission(
    arrivals: list[int],
) -> None:
    count = len(arrivals)
    engine = RecordingEngine(count)
    called: list[int] = []
    done: list[int] = []
    with ForwardStream(engine) as stream:
        for index in range(count):
            step = stream.submit(empty_step(index))
            step.add_done_callback(lambda future: done.append(future.result().step_id))
            stream.call(lambda: called.append(len(engine.launched)))
        for index in arrivals:
            engine.arrived[index].set()
    assert engine.launched == done == list(range(count))
    # Each closure saw exactly the steps that were submitted before it.
    assert called == list(range(1, count + 1))
    assert stream.steps_done == count


def test_a_closure_sees_what_the_steps_before_it_wrote_and_nothing_later() -> None:
    """Defects 1 and 47: the host read state while the forward that writes it was under way."""
    release = threading.Event()
    engine = fake_engine(lambda plan: assert_set(release))
    prompt = extended(0, ANNA.tokens)
    with ForwardStream(engine) as stream:
        stream.submit(prefill(0, [(ANNA, 0, 6)], SlotOps(clears=(2,))))
        ordered = stream.call(lambda: engine.slabs.stamps(Kind.RECURRENT)[2, :2].tolist())
        stream.submit(decode(1, [(ANNA, 6)]))
        # Read from the scheduler's thread, out of order: the slot has no valid state yet.
        unordered = engine.slabs.stamps(Kind.RECURRENT)[2, :2].tolist()
        release.set()
        assert ordered.result(60) == [prompt[-1], 6]
        assert unordered != [prompt[-1], 6]


def test_two_steps_in_flight_pass_the_token_on_the_device() -> None:
    release = threading.Event()
    engine = fake_engine(lambda plan: assert_set(release))
    with ForwardStream(engine) as stream:
        steps = [
            stream.submit(prefill(0, [(ANNA, 0, 6)], SlotOps(clears=(2,)))),
            stream.submit(decode(1, [(ANNA, 6)])),
            stream.submit(decode(2, [(ANNA, 7)], SlotOps(snapshots=(SlotSnapshot(2, 4, 8),)))),
        ]
        release.set()
        found = [step.result(60).sampled[0].token_id for step in steps]
    assert found == fake_tokens(ANNA.tokens, 3, engine.vocab_size)


def fake_engine(pace: object) -> FakeEngine:
    manifest = fake_manifest(PAGE)
    sizes = {Kind.FULL: 8, Kind.RECURRENT: 6}
    return FakeEngine(manifest, sizes, max_rows=2, max_len=32, pace=pace)  # type: ignore[arg-type]


def assert_set(event: threading.Event) -> None:
    assert event.wait(60)


def test_a_failed_step_poisons_the_stream() -> None:
    engine = RecordingEngine(3)
    engine.fails.add(1)
    engine.arrived[0].set()
    hold = threading.Event()
    with ForwardStream(engine) as stream:
        stream.call(lambda: assert_set(hold))
        good, bad, later = (stream.submit(empty_step(i)) for i in range(3))
        closure = stream.call(lambda: 1)
        hold.set()
        assert good.result(60).step_id == 0
        with pytest.raises(ValueError, match="no step 1"):
            bad.result(60)
        for future in (later, closure):
            with pytest.raises(StreamPoisoned, match="no step 1"):
                future.result(60)
        with pytest.raises(StreamPoisoned, match="state on the device is unknown"):
            stream.submit(empty_step(2))
    assert engine.launched == [0]


def test_a_step_that_fails_when_its_values_are_fetched_poisons_too() -> None:
    class BrokenStep(Later):
        def outcome(self) -> StepOutcome:
            raise RuntimeError("device-side assert")

    class BrokenEngine(RecordingEngine):
        def launch(self, plan: StepPlan) -> Later:
            super().launch(plan)
            return BrokenStep(plan.step_id, self.arrived[plan.step_id])

    engine = BrokenEngine(1)
    with ForwardStream(engine) as stream:
        future = stream.submit(empty_step(0))
        engine.arrived[0].set()
        with pytest.raises(RuntimeError, match="device-side assert"):
            future.result(60)
        with pytest.raises(StreamPoisoned):
            stream.call(lambda: None)


def test_what_a_closure_raises_reaches_only_its_caller() -> None:
    engine = RecordingEngine(1)
    engine.arrived[0].set()
    with ForwardStream(engine) as stream:
        with pytest.raises(ZeroDivisionError):
            stream.call(lambda: 1 // 0).result(60)
        assert stream.submit(empty_step(0)).result(60).step_id == 0


def test_a_full_queue_refuses() -> None:
    hold = threading.Event()
    held = threading.Event()

    def wait() -> None:
        held.set()
        assert_set(hold)

    with ForwardStream(RecordingEngine(0), depth=2) as stream:
        stream.call(wait)
        assert_set(held)
        stream.call(lambda: None)
        stream.call(lambda: None)
        with pytest.raises(QueueFull, match="2 jobs wait on the forward stream"):
            stream.call(lambda: None)
        hold.set()


def test_a_step_is_taken_however_many_closures_wait_before_it() -> None:
    """The step was planned, and a plan cannot be undone."""
    hold, held = threading.Event(), threading.Event()

    def wait() -> None:
        held.set()
        assert_set(hold)

    engine = RecordingEngine(1)
    engine.arrived[0].set()
    with ForwardStream(engine, depth=2) as stream:
        stream.call(wait)
        assert_set(held)
        while True:
            try:
                stream.call(lambda: None)
            except QueueFull:
                break
        step = stream.submit(empty_step(0))
        hold.set()
        assert step.result(60).step_id == 0


def test_closing_drains_and_then_refuses() -> None:
    engine = RecordingEngine(2)
    stream = ForwardStream(engine)
    futures = [stream.submit(empty_step(i)) for i in range(2)]
    for event in engine.arrived:
        event.set()
    stream.close()
    stream.close()
    assert [future.result(0).step_id for future in futures] == [0, 1]
    with pytest.raises(StreamClosed):
        stream.submit(empty_step(2))


async def test_cancelling_who_waits_does_not_skip_the_step() -> None:
    engine = RecordingEngine(2)
    stream = ForwardStream(engine)
    waiting = asyncio.ensure_future(stream.run(empty_step(0)))
    await asyncio.to_thread(engine.was_launched[0].wait, 60)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    for event in engine.arrived:
        event.set()
    assert (await stream.run(empty_step(1))).step_id == 1
    assert stream.steps_done == 2
    await asyncio.to_thread(stream.close)


def test_the_thread_enters_its_context_once() -> None:
    entered: list[str] = []

    @contextmanager
    def context() -> Iterator[None]:
        entered.append(threading.current_thread().name)
        yield
        entered.append("left")

    with ForwardStream(RecordingEngine(0), context=context()) as stream:
        stream.call(lambda: None).result(60)
        assert entered == ["forward-stream"]
    assert entered == ["forward-stream", "left"]


def test_progress_is_told_by_steps_and_not_by_the_loop() -> None:
    engine = RecordingEngine(2)
    engine.arrived[0].set()
    with ForwardStream(engine) as stream:
        began = stream.last_progress
        stream.submit(empty_step(0)).result(60)
        assert (stream.steps_done, stream.last_progress >= began) == (1, True)
        seen = stream.last_progress
        stuck = stream.submit(empty_step(1))
        assert engine.was_launched[1].wait(60)
        assert (stream.steps_done, stream.last_progress) == (1, seen)
        engine.arrived[1].set()
        stuck.result(60)
        assert stream.steps_done == 2
