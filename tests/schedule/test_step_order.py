"""The order of steps decides how long running requests wait for the prompts of others."""

from __future__ import annotations

import pytest
from tests.harness.schedule import HYBRID, PAGE, RandomDrafts, ScheduledWorker, request

from ferryman.cache.manifest import Kind
from ferryman.schedule.batch import DecodeStep, MixedStep, PrefillStep, StepPlan
from ferryman.schedule.limits import IN_TURNS, PREFILL_FIRST, TOGETHER, StepOrder

ROOM = {Kind.FULL: 60, Kind.RECURRENT: 40}
CHUNK = 8
LONG = [7] * 40


def worker_with(order: StepOrder, *, overlap: bool = True, max_running: int = 4) -> ScheduledWorker:
    return ScheduledWorker(
        HYBRID,
        ROOM,
        overlap=overlap,
        max_running=max_running,
        chunk_tokens=CHUNK,
        order=order,
        prefix_cache=False,
    )


def kinds_run(worker: ScheduledWorker) -> list[str]:
    """The kinds of all steps from now on, in the order of their planning."""
    found = []
    while worker.plan() or worker.queued:
        while worker.plan():
            pass
        found.append("prefill" if isinstance(worker.queued[0], PrefillStep) else "decode")
        worker.run_oldest()
    return found


def waits_between_decode_steps(kinds: list[str]) -> list[int]:
    """How many chunks run between two decode steps, while prompts are computed."""
    last = len(kinds) - 1 - kinds[::-1].index("prefill")
    parts = "".join(kind[0] for kind in kinds[:last]).split("d")
    return [len(part) for part in parts[1:]]


def steps_run(worker: ScheduledWorker) -> list[StepPlan]:
    """All steps from now on, in the order of their planning."""
    steps: list[StepPlan] = []
    while worker.plan() or worker.queued:
        while worker.plan():
            pass
        steps.append(worker.queued[0])
        worker.run_oldest()
    return steps


def num_tokens(prompts: PrefillStep) -> int:
    return sum(chunk.end - chunk.start for chunk in prompts.chunks)


def started(worker: ScheduledWorker, count: int = 1) -> None:
    """Requests that decode."""
    for index in range(count):
        worker.submit(request(HYBRID, f"running-{index}", [index + 1] * 3, max_tokens=30))
    while len(worker.scheduler.sequences.decoding) < count:
        worker.plan()
        worker.run_oldest()


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one step at a time"])
def test_in_turns_a_running_request_waits_for_one_chunk_at_most(overlap: bool) -> None:
    worker = worker_with(IN_TURNS, overlap=overlap)
    started(worker)
    worker.submit(request(HYBRID, "long", LONG, max_tokens=3))
    assert max(waits_between_decode_steps(kinds_run(worker))) == 1
    for name in ("running-0", "long"):
        assert worker.tokens[name] == worker.expected(name)


def test_with_prompts_first_a_running_request_waits_for_all_of_them() -> None:
    worker = worker_with(PREFILL_FIRST)
    started(worker)
    worker.submit(request(HYBRID, "long", LONG, max_tokens=3))
    kinds = kinds_run(worker)
    assert max(len(part) for part in "".join(k[0] for k in kinds).split("d")) == len(LONG) // CHUNK
    assert worker.tokens["running-0"] == worker.expected("running-0")


def test_both_steps_of_a_turn_share_one_budget_of_tokens() -> None:
    worker = worker_with(IN_TURNS)
    started(worker, count=3)
    worker.submit(request(HYBRID, "long", LONG, max_tokens=3))
    turns = []
    while worker.plan() or worker.queued:
        while worker.plan():
            pass
        step = worker.queued[0]
        if isinstance(step, PrefillStep):
            turns.append(sum(chunk.end - chunk.start for chunk in step.chunks))
        worker.run_oldest()
    assert max(turns) == CHUNK - PAGE, "three tokens of the budget decode, and chunks end on pages"


def test_many_running_requests_leave_a_prompt_the_least_chunk() -> None:
    assert IN_TURNS.prefill_tokens(CHUNK, 100, PAGE) == PAGE
    assert IN_TURNS.prefill_tokens(CHUNK, 1, PAGE) == CHUNK - 1
    assert PREFILL_FIRST.prefill_tokens(CHUNK, 100, PAGE) == CHUNK


def test_in_turns_prompts_advance_while_requests_decode() -> None:
    worker = worker_with(IN_TURNS, max_running=4)
    started(worker, count=2)
    worker.submit(request(HYBRID, "long", LONG, max_tokens=3))
    kinds = kinds_run(worker)
    said = "".join(kind[0] for kind in kinds).strip("d")
    assert max(len(part) for part in said.split("p")) == 1, "decode steps between chunks"
    assert worker.tokens["long"] == worker.expected("long")


def test_a_step_of_the_other_kind_runs_where_one_kind_has_nothing_to_do() -> None:
    worker = worker_with(IN_TURNS)
    worker.submit(request(HYBRID, "alone", LONG, max_tokens=4))
    kinds = kinds_run(worker)
    assert kinds == ["prefill"] * (len(LONG) // CHUNK) + ["decode"] * 3


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one step at a time"])
def test_together_a_running_request_draws_a_token_in_each_step(overlap: bool) -> None:
    worker = worker_with(TOGETHER, overlap=overlap)
    started(worker, count=2)
    worker.submit(request(HYBRID, "long", LONG, max_tokens=3))
    steps = steps_run(worker)
    beside = [step for step in steps if isinstance(step, MixedStep)]
    assert not any(isinstance(step, PrefillStep) for step in steps)
    assert sum(num_tokens(step.prompts) for step in beside) == len(LONG)
    assert {step.tokens.request_ids for step in beside} == {("running-0", "running-1")}
    for name in ("running-0", "running-1", "long"):
        assert worker.tokens[name] == worker.expected(name)


def test_together_a_prompt_draws_once_in_the_step_that_ends_it() -> None:
    worker = worker_with(TOGETHER)
    started(worker)
    worker.submit(request(HYBRID, "short", [7] * PAGE, max_tokens=5))
    first, second, *_ = steps_run(worker)
    assert isinstance(first, MixedStep)
    assert isinstance(second, DecodeStep)
    assert [draw.row for draw in first.draws] == [
        first.prompts.chunks[0].row,
        first.tokens.draws[0].row,
    ]
    assert set(second.request_ids) == {"running-0", "short"}
    assert worker.tokens["short"] == worker.expected("short")


def test_together_a_prompt_alone_has_the_whole_budget_and_a_part_of_it_beside_others() -> None:
    assert TOGETHER.prefill_tokens(512, 0, PAGE) == 512
    assert TOGETHER.prefill_tokens(512, 8, PAGE) == 120
    assert TOGETHER.prefill_tokens(512, 200, PAGE) == PAGE
    worker = worker_with(TOGETHER)
    worker.submit(request(HYBRID, "alone", LONG, max_tokens=4))
    steps = steps_run(worker)
    assert [isinstance(step, PrefillStep) for step in steps] == [True] * 5 + [False] * 3


def test_together_requests_that_draft_go_in_turns() -> None:
    worker = ScheduledWorker(
        HYBRID, ROOM, chunk_tokens=CHUNK, order=TOGETHER, drafting=RandomDrafts(2, seed=1)
    )
    started(worker)
    worker.submit(request(HYBRID, "long", LONG, max_tokens=3))
    kinds = kinds_run(worker)
    assert max(waits_between_decode_steps(kinds)) == 1
    assert worker.tokens["long"] == worker.expected("long")
