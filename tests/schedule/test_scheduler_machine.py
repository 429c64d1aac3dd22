"""The scheduler under random schedules, on stamped slots: every read finds the state it needs.

Steps run late and in any legal interleaving with arrivals, cancellations and overlap; pools are so
small that eviction and retraction happen all the time. In every case tokens are exact, no slot
leaks, and the worker never stands still.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from tests.harness.schedule import HYBRID, MANIFESTS, RandomDrafts, ScheduledWorker, request

from ferryman.cache.manifest import Kind
from ferryman.schedule.drafting import NO_DRAFTS, Drafting, ModelDrafts
from ferryman.schedule.events import Finished, Retracted
from ferryman.schedule.limits import IN_TURNS, PREFILL_FIRST, TOGETHER, StepOrder

DRAFTING: dict[str, Drafting] = {
    "plain": NO_DRAFTS,
    "one draft": RandomDrafts(1),
    "three drafts": RandomDrafts(3, seed=1),
    "more than a page of drafts": RandomDrafts(6, chance=0.9, seed=2),
    "a draft model": ModelDrafts(3),
}
# Prompts branch off a few stems, so that prefixes are shared, forked and evicted.
STEMS = ([1] * 9, [1] * 17, [2] * 13)
PROMPTS = st.builds(
    lambda stem, tail: [*stem, *tail],
    st.sampled_from(STEMS),
    st.lists(st.integers(0, 2), max_size=12),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, steps and cancellations in any order."""

    @initialize(
        name=st.sampled_from(sorted(MANIFESTS)),
        overlap=st.booleans(),
        prefix_cache=st.booleans(),
        full=st.integers(10, 20),
        chunk_tokens=st.sampled_from([4, 8, 64]),
        drafting=st.sampled_from(sorted(DRAFTING)),
        order=st.sampled_from([PREFILL_FIRST, IN_TURNS, TOGETHER]),
    )
    def start(
        self,
        name: str,
        overlap: bool,
        prefix_cache: bool,
        full: int,
        chunk_tokens: int,
        drafting: str,
        order: StepOrder,
    ) -> None:
        manifest = MANIFESTS[name]
        sizes = {Kind.FULL: full, Kind.WINDOW: 26, Kind.RECURRENT: 9}
        self.worker = ScheduledWorker(
            manifest,
            sizes,
            overlap=overlap,
            prefix_cache=prefix_cache,
            chunk_tokens=chunk_tokens,
            drafting=DRAFTING[drafting],
            order=order,
        )
        self.count = 0
        self.cancelled: set[str] = set()

    @rule(prompt=PROMPTS, max_tokens=st.integers(1, 10))
    def arrive(self, prompt: list[int], max_tokens: int) -> None:
        self.count += 1
        asked = request(self.worker.manifest, f"r{self.count}", prompt, max_tokens)
        self.worker.submit(asked)

    @rule(times=st.integers(1, 4))
    def plan(self, times: int) -> None:
        for _ in range(times):
            self.worker.plan()

    @rule()
    def run_oldest(self) -> None:
        self.worker.run_oldest()

    @rule(times=st.integers(1, 30))
    def advance(self, times: int) -> None:
        for _ in range(times):
            self.worker.plan()
            self.worker.run_oldest()

    @precondition(lambda self: self.count)
    @rule(pick=st.integers(1, 99))
    def cancel(self, pick: int) -> None:
        request_id = f"r{1 + pick % self.count}"
        if self.worker.scheduler.cancel(request_id, self.worker.now):
            self.cancelled.add(request_id)
        self.worker.collect()

    @invariant()
    def every_ledger_balances(self) -> None:
        if hasattr(self, "worker"):
            assert all(ledger.balances for ledger in self.worker.scheduler.ledgers().values())

    def teardown(self) -> None:
        if not hasattr(self, "worker"):
            return
        self.worker.drain()
        for request_id in self.worker.requests:
            tokens, expected = self.worker.tokens[request_id], self.worker.expected(request_id)
            if request_id in self.cancelled:
                assert tokens == expected[: len(tokens)]
            else:
                assert tokens == expected
        finished = [event.request_id for event in self.worker.seen(Finished)]
        assert sorted(finished) == sorted(self.worker.requests), "each request ends exactly once"
        for kind, ledger in self.worker.scheduler.ledgers().items():
            assert set(ledger.by_role) <= {"tree"}, f"{kind} slots leak: {ledger}"


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one step at a time"])
def test_a_pool_that_is_too_small_for_all_retracts_the_newest(overlap: bool) -> None:
    manifest = HYBRID
    worker = ScheduledWorker(manifest, {Kind.FULL: 9, Kind.RECURRENT: 12}, overlap=overlap)
    for index in range(3):
        worker.submit(request(manifest, f"r{index}", [index] * 6, max_tokens=18))
    worker.drain()
    retracted = {event.request_id for event in worker.seen(Retracted)}
    assert retracted, "the pools were meant to run out"
    assert "r0" not in retracted, "the oldest is never pushed back"
    for index in range(3):
        assert worker.tokens[f"r{index}"] == worker.expected(f"r{index}")
