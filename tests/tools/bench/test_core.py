"""The bench of the core times what it says it times."""

from __future__ import annotations

from tools.bench import core


def test_a_measured_step_draws_for_every_request_and_frees_nothing() -> None:
    scheduler = core.decoding_scheduler(8)
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert len(plan.draws) == 8
    scheduler.commit(plan, core.outcome_of(plan), 0.0)
    assert len(scheduler.take_events()) == 8
    assert scheduler.statistics().decoding == 8
    scheduler.check_integrity()


def test_an_insertion_that_is_measured_adds_half_of_its_prompt() -> None:
    assert core.insert_timing(1_024, repeats=2).median > 0
