"""State that gave NaN or infinity leaves the tree, and no request resumes from it.

The bad page is not known, so the whole chain goes. Running requests that use the chain continue on
their slots, and publish none of it; under random schedules too, on stamped slots.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from tests.doubles.stamps import fake_manifest
from tests.harness.schedule import HYBRID, MANIFESTS, ScheduledWorker, request
from tests.schedule.test_isolation import nothing_is_held
from tests.schedule.test_scheduler_machine import SchedulerMachine

from ferryman.cache.manifest import Kind
from ferryman.errors import NonFiniteLogits, NonFiniteState
from ferryman.schedule.batch import (
    NO_TOKEN,
    PrefillStep,
    Sampled,
    StepOutcome,
    StepPlan,
    halves_of,
)
from ferryman.schedule.events import ChainDropped, Finished, RequestFailed, SequenceAdmitted
from ferryman.schedule.sequence import Goal

ALL_MANIFESTS = {**MANIFESTS, "recurrent only": fake_manifest(4, kinds=[Kind.RECURRENT])}
ROOM = {Kind.FULL: 60, Kind.WINDOW: 60, Kind.RECURRENT: 60}
NAN = Sampled(NO_TOKEN, {})
STEM = [1] * 17


def worker_of(name: str, *, overlap: bool = False) -> ScheduledWorker:
    manifest = ALL_MANIFESTS[name]
    return ScheduledWorker(manifest, ROOM, overlap=overlap)


def ask(
    worker: ScheduledWorker,
    name: str,
    prompt: list[int],
    max_tokens: int = 4,
    goal: Goal = Goal.DECODE,
) -> None:
    worker.submit(request(worker.manifest, name, prompt, max_tokens), goal)


def drawers(plan: StepPlan) -> list[str]:
    """The request of each draw of a step, in order; of a run of drafts, the first draw only."""
    names: list[str] = []
    for half in halves_of(plan):
        if isinstance(half, PrefillStep):
            names += [chunk.request_id for chunk in half.chunks for _ in chunk.draws]
        else:
            names += half.request_ids
    return names


def spoilt(plan: StepPlan, outcome: StepOutcome, name: str) -> StepOutcome:
    """The same outcome, but one request's row is not finite."""
    sampled = list(outcome.sampled)
    sampled[drawers(plan).index(name)] = NAN
    return replace(outcome, sampled=tuple(sampled))


def run_until_drawn(worker: ScheduledWorker, name: str) -> None:
    """Up to the next step in which this request draws; its row is no numbers."""
    while True:
        worker.plan()
        assert worker.queued, f"{name} draws nothing"
        if name in drawers(worker.queued[0]):
            break
        worker.run_oldest()
    plan = worker.queued.popleft()
    worker.scheduler.commit(plan, spoilt(plan, worker.engine.run(plan), name), worker.now)
    worker.collect()


def matched(worker: ScheduledWorker, name: str) -> int:
    return worker.scheduler.allocator.tree.match_depth(worker.requests[name].keys)


def position_of(worker: ScheduledWorker, name: str) -> int:
    """Where a request was last admitted to resume."""
    return [e.plan.position for e in worker.seen(SequenceAdmitted) if e.request_id == name][-1]


@pytest.mark.parametrize("overlap", [False, True], ids=["one step at a time", "overlap"])
@pytest.mark.parametrize("name", sorted(ALL_MANIFESTS))
def test_reused_state_that_gives_no_numbers_is_dropped_and_computed_anew(
    name: str, overlap: bool
) -> None:
    worker = worker_of(name, overlap=overlap)
    ask(worker, "first", STEM)
    worker.drain()
    ask(worker, "guilty", [*STEM, 5])
    run_until_drawn(worker, "guilty")
    assert position_of(worker, "guilty") == 16, "it resumed from what the first one left"
    worker.drain()
    (failed,) = worker.seen(RequestFailed)
    assert isinstance(failed.error, NonFiniteState)
    first = worker.requests["first"].keys[0]
    assert worker.seen(ChainDropped) == [ChainDropped("guilty", first, was_reused=True)]
    assert matched(worker, "first") == 0
    ask(worker, "again", [*STEM, 5])
    worker.drain()
    assert position_of(worker, "again") == 0
    assert worker.tokens["again"] == worker.expected("again")
    assert matched(worker, "again") == 4, "what is computed anew is cached anew"
    nothing_is_held(worker)


@pytest.mark.parametrize("name", sorted(ALL_MANIFESTS))
def test_what_a_prompt_left_before_its_last_chunk_goes_when_that_gives_no_numbers(
    name: str,
) -> None:
    worker = worker_of(name)
    ask(worker, "guilty", [*STEM, *STEM])
    while worker.scheduler.statistics().prefill_steps < 4:
        worker.plan()
        worker.run_oldest()
    assert matched(worker, "guilty") > 0, "some of it is cached before its end is known"
    run_until_drawn(worker, "guilty")
    (failed,) = worker.seen(RequestFailed)
    assert isinstance(failed.error, NonFiniteLogits), "all of it was computed here"
    (dropped,) = worker.seen(ChainDropped)
    assert not dropped.was_reused
    assert matched(worker, "guilty") == 0
    nothing_is_held(worker)


@pytest.mark.parametrize("overlap", [False, True], ids=["one step at a time", "overlap"])
@pytest.mark.parametrize("goal", list(Goal), ids=str)
@pytest.mark.parametrize("name", sorted(ALL_MANIFESTS))
def test_who_stands_on_dropped_state_goes_on_and_leaves_nothing(
    name: str, goal: Goal, overlap: bool
) -> None:
    worker = worker_of(name, overlap=overlap)
    ask(worker, "first", STEM)
    worker.drain()
    ask(worker, "beside", [*STEM, 7, 7, 7, 7], 12)
    ask(worker, "held", [*STEM, 8], goal=Goal.HAND_OFF)
    ask(worker, "guilty", [*STEM, 5], 12, goal)
    ask(worker, "late", [*STEM, *STEM, *STEM], 6)  # four chunks: it prefills when they decode
    run_until_drawn(worker, "guilty")
    for each in ("beside", "held", "late"):
        assert position_of(worker, each) == 16
    assert matched(worker, "beside") == 0
    ask(worker, "other", [9] * 17)
    worker.drain()
    held = worker.scheduler.units_at("held", worker.manifest.kinds[0], 4, 5)
    assert held, "what is held can still be sent"
    worker.scheduler.release_held("held", worker.now)
    for each in ("beside", "late", "other"):
        assert worker.tokens[each] == worker.expected(each)
    assert matched(worker, "beside") == matched(worker, "late") == 0
    assert matched(worker, "other") == 4
    nothing_is_held(worker)


def test_a_second_row_from_state_that_was_dropped_is_no_news() -> None:
    worker = worker_of("hybrid")
    ask(worker, "first", STEM)
    worker.drain()
    ask(worker, "guilty", [*STEM, 5], 9)
    ask(worker, "beside", [*STEM, 7], 9)
    run_until_drawn(worker, "guilty")
    run_until_drawn(worker, "beside")
    errors = [failed.error for failed in worker.seen(RequestFailed)]
    assert [type(error) for error in errors] == [NonFiniteState, NonFiniteState]
    assert [dropped.request_id for dropped in worker.seen(ChainDropped)] == ["guilty"]
    nothing_is_held(worker)


def test_a_page_taken_from_another_while_both_ran_is_reused_state() -> None:
    manifest = HYBRID
    worker = ScheduledWorker(manifest, dict.fromkeys(manifest.kinds, 60), chunk_tokens=64)
    ask(worker, "first", STEM, 9)
    ask(worker, "twin", STEM, 9)
    worker.plan()
    worker.run_oldest()
    assert position_of(worker, "twin") == 0, "they were admitted together, and both computed"
    run_until_drawn(worker, "twin")
    (failed,) = worker.seen(RequestFailed)
    assert isinstance(failed.error, NonFiniteState)
    worker.drain()
    assert worker.tokens["first"] == worker.expected("first")
    nothing_is_held(worker)


class SpoilingMachine(SchedulerMachine):
    """As its base; now and then a row is no numbers."""

    @precondition(lambda self: bool(hasattr(self, "worker") and self.worker.queued))
    @rule(pick=st.integers(0, 9))
    def spoil(self, pick: int) -> None:
        worker, plan = self.worker, self.worker.queued.popleft()
        outcome, names = worker.engine.run(plan), drawers(plan)
        if names:
            outcome = spoilt(plan, outcome, names[pick % len(names)])
        worker.scheduler.commit(plan, outcome, worker.now)
        worker.collect()
        for failed in worker.seen(RequestFailed):
            assert isinstance(failed.error, NonFiniteLogits | NonFiniteState)

    def teardown(self) -> None:
        if not hasattr(self, "worker"):
            return
        worker = self.worker
        worker.drain()
        failed = {event.request_id for event in worker.seen(RequestFailed)}
        for name in worker.requests:
            tokens, expected = worker.tokens[name], worker.expected(name)
            is_cut = name in failed or name in self.cancelled
            assert tokens == (expected[: len(tokens)] if is_cut else expected)
        ended = [event.request_id for event in worker.seen(Finished)] + sorted(failed)
        assert sorted(ended) == sorted(worker.requests), "each request ends exactly once"
        nothing_is_held(worker)


TestSpoilingMachine = SpoilingMachine.TestCase
TestSpoilingMachine.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
