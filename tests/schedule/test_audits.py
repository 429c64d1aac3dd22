"""Audits in the schedule: which request is computed again, when, and at whose cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.doubles.stamps import fake_tokens, next_token
from tests.harness.schedule import ALL_KINDS, HYBRID, MANIFESTS, PAGE, WatchedWorker, request

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.slots import Role
from ferryman.engine.bit_comparison import first_difference
from ferryman.schedule.audit.budget import AuditBudget, is_chosen
from ferryman.schedule.audit.open_audit import CHUNK_TOKENS
from ferryman.schedule.batch import AuditStep, DecodeStep, StepPlan
from ferryman.schedule.events import (
    AuditDone,
    AuditOpened,
    AuditReady,
    AuditResult,
    Finished,
    RequestFailed,
    Retracted,
)
from ferryman.schedule.request import FinishReason
from ferryman.schedule.sequence import Goal

STEM = [7, 3, 9, 4, 1, 1, 8, 2, 6, 5]
SIZES = {Kind.FULL: 40, Kind.WINDOW: 60, Kind.RECURRENT: 24}


class AuditedWorker(WatchedWorker):
    """Compares at once what an audit has computed. `steps` are all plans, in their order."""

    def __init__(self, manifest: StateManifest, share: float = 1.0, **options: object) -> None:
        sizes = options.pop("sizes", SIZES)
        self.steps: list[StepPlan] = []
        self.compared: list[AuditReady] = []
        self.has_auditor = self.has_memory = True
        super().__init__(manifest, sizes, audit_share=share, **options)  # type: ignore[arg-type]

    def plan(self) -> bool:
        before = len(self.queued)
        planned = super().plan()
        self.steps += list(self.queued)[before:]
        return planned

    def collect(self) -> None:
        num_heard = len(self.events)
        super().collect()
        for event in self.events[num_heard:]:
            if isinstance(event, AuditReady) and self.has_auditor:
                self.compare(event)
            if isinstance(event, AuditOpened) and self.has_memory:
                self.scheduler.audits.prepared(event.request_id)

    def compare(self, event: AuditReady) -> None:
        assert first_difference(self.manifest, self.engine.transfer, event.pairs) is None
        assert event.wrong_token is None
        if self.scheduler.audits.close(event.request_id):
            self.compared.append(event)

    @property
    def audited_tokens(self) -> int:
        return sum(
            c.end - c.start for s in self.steps if isinstance(s, AuditStep) for c in s.chunks
        )

    def ask(self, name: str, token_ids: Sequence[int], max_tokens: int = 4) -> None:
        self.submit(request(self.manifest, name, token_ids, max_tokens))

    def answer(self, name: str, token_ids: Sequence[int], max_tokens: int = 4) -> None:
        self.ask(name, token_ids, max_tokens)
        self.drain()

    def done(self) -> list[AuditResult]:
        return [event.result for event in self.seen(AuditDone)]

    def holds(self) -> bool:
        """Whether an audit holds a slot."""
        ledgers = self.scheduler.ledgers().values()
        return any(Role.AUDIT in ledger.by_role for ledger in ledgers)


@pytest.mark.parametrize("manifest", MANIFESTS.values(), ids=MANIFESTS)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_that_reused_state_is_computed_again(
    manifest: StateManifest, overlap: bool
) -> None:
    worker = AuditedWorker(manifest, overlap=overlap)
    worker.answer("first", STEM)
    assert not worker.compared, "it reused nothing"
    worker.answer("second", [*STEM, 4, 4, 2], max_tokens=7)
    (audit,) = worker.compared
    assert (audit.request_id, audit.reuse) == ("second", ("device",))
    assert audit.position == 13 + 7 - 1
    assert {pair.unit.kind for pair in audit.pairs} == set(manifest.kinds)
    assert not worker.holds()


def test_draws_tell_whose_they_are_apart_from_the_next_of_their_row() -> None:
    """Requests and audits, which get the rows of those before."""
    worker = AuditedWorker(HYBRID)
    names = ("first", "second", "third")
    for index, name in enumerate(names):
        worker.answer(name, [*STEM, *[4] * index], max_tokens=7)
    num_audits = len(worker.compared)
    draws = [draw for step in worker.steps for draw in step.draws]
    owners = {(draw.row, draw.arrival) for draw in draws}
    assert num_audits
    assert len({arrival for _, arrival in owners}) == len(owners) == len(names) + num_audits
    assert len({row for row, _ in owners}) < len(owners), "rows were used again"


def test_each_unit_says_where_it_came_from() -> None:
    worker = AuditedWorker(HYBRID)
    worker.answer("first", STEM)
    worker.answer("second", [*STEM, 4, 4, 2], max_tokens=7)
    units = [pair.unit for pair in worker.compared[0].pairs]
    origins = {(unit.kind, unit.index): unit.origin for unit in units}
    assert origins == {
        (Kind.FULL, 0): "device",
        (Kind.FULL, 1): "device",
        (Kind.FULL, 2): "computed",
        (Kind.FULL, 3): "computed",
        (Kind.FULL, 4): "computed",
        (Kind.RECURRENT, 19): "device",
    }
    assert [unit.num_tokens for unit in units] == [4, 4, 4, 4, 3, 0], (
        "a page counts as far as it is"
    )


def test_another_state_is_found() -> None:
    worker = AuditedWorker(ALL_KINDS)
    worker.has_auditor = False
    worker.answer("first", STEM)
    worker.answer("second", [*STEM, 4, 4, 2])
    (ready,) = worker.seen(AuditReady)
    spoilt = ready.pairs[1].unit
    worker.engine.slabs.stamps(spoilt.kind)[spoilt.handle.slot, 1] += 1
    difference = first_difference(ALL_KINDS, worker.engine.transfer, ready.pairs)
    assert difference is not None
    assert (difference.unit, difference.num_units) == (spoilt, 1)
    assert difference.served != difference.cold


def test_a_token_that_comes_out_as_another_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = AuditedWorker(HYBRID)
    worker.has_auditor = False
    worker.answer("first", STEM)
    wrong = "tests.doubles.fake_engine.next_token"
    monkeypatch.setattr(wrong, lambda prefix, size: next_token(prefix, size) ^ 1)
    worker.ask("second", [*STEM, 4, 4, 2], max_tokens=5)
    while len(worker.seen(Finished)) < 2:
        worker.plan()
        worker.run_oldest()
    monkeypatch.undo()
    worker.drain()
    (ready,) = worker.seen(AuditReady)
    assert ready.wrong_token == 13


def test_positions_behind_the_last_token_do_not_count() -> None:
    worker = AuditedWorker(HYBRID)
    worker.has_auditor = False
    worker.answer("first", STEM)
    worker.answer("second", [*STEM, 4, 4, 2], max_tokens=7)
    (ready,) = worker.seen(AuditReady)
    last = [pair.unit for pair in ready.pairs if pair.unit.kind is Kind.FULL][-1]
    assert 0 < last.num_tokens < PAGE
    worker.engine.slabs.stamps(Kind.FULL)[last.handle.slot, last.num_tokens] = 1
    assert first_difference(HYBRID, worker.engine.transfer, ready.pairs) is None


def test_what_was_retracted_is_computed_again() -> None:
    sizes = {Kind.FULL: 20, Kind.RECURRENT: 30}
    worker = AuditedWorker(HYBRID, sizes=sizes)
    for name in "abc":
        worker.ask(name, [ord(name), 2, 3, 4, 5, 6], max_tokens=28)
    worker.drain()
    assert worker.seen(Retracted)
    assert ("device", "retraction") in [event.reuse for event in worker.compared]


@pytest.mark.parametrize("manifest", MANIFESTS.values(), ids=MANIFESTS)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_ran_on_behind_the_last_token_is_computed_again_too(
    manifest: StateManifest, overlap: bool
) -> None:
    """With overlap a stop is found when the next step has consumed the token that stops."""
    worker = AuditedWorker(manifest, overlap=overlap)
    worker.answer("first", STEM)
    asked = request(manifest, "second", [*STEM, 4, 4, 2], max_tokens=20)
    tokens = fake_tokens(asked.token_ids, 20, worker.vocab_size)
    worker.submit(replace(asked, stop_token_ids=frozenset(tokens[6:7])))
    while not worker.seen(Finished)[1:]:
        worker.plan()
        worker.plan()
        worker.run_oldest()
    worker.drain()
    assert worker.tokens["second"] == tokens[:7]
    (audit,) = worker.compared
    assert audit.position == 13 + 7 - (not overlap)


@pytest.mark.parametrize("num_generated", [0, 3])
def test_a_request_that_was_taken_over_is_computed_again(num_generated: int) -> None:
    worker = AuditedWorker(HYBRID)
    asked = request(HYBRID, "taken", STEM, max_tokens=9)
    known = fake_tokens(asked.token_ids, num_generated, worker.vocab_size)
    again = request(HYBRID, "taken", [*STEM, *known], max_tokens=9)
    worker.scheduler.submit(replace(again, num_generated=num_generated), Goal.DECODE)
    worker.requests["taken"], worker.tokens["taken"] = asked, [*known]
    worker.drain()
    reuse = [event.reuse for event in worker.compared]
    assert reuse == ([("recovery",)] if num_generated else [])


def test_a_request_that_waits_goes_first() -> None:
    worker = AuditedWorker(HYBRID, overlap=False)
    worker.answer("first", STEM)
    worker.ask("second", [*STEM, 4, 4, 2])
    while not worker.seen(Finished)[1:]:
        worker.plan()
        worker.run_oldest()
    worker.ask("third", [5] * 9, max_tokens=1)
    worker.plan()
    assert not isinstance(worker.steps[-1], AuditStep)
    worker.drain()
    assert [event.request_id for event in worker.compared] == ["second"]


def test_an_audit_steps_in_after_a_share_of_the_steps() -> None:
    worker = AuditedWorker(HYBRID, share=0.25, chunk_tokens=4, overlap=False)
    worker.scheduler.audits.budget.earn(1000)
    names = (name for name in map("second-{}".format, range(100)) if is_chosen(name, 0.25))
    worker.answer("first", STEM)
    worker.ask("other", [6] * 5, max_tokens=40)
    worker.answer(next(names), [*STEM, 4, 4, 2])
    assert worker.compared
    places = [index for index, step in enumerate(worker.steps) if isinstance(step, AuditStep)]
    decoding = [i for i, step in enumerate(worker.steps) if isinstance(step, DecodeStep)]
    beside = [place for place in places if place < decoding[-1]]
    assert len(beside) > 2, "it was computed beside the other request"
    assert all(later - before > 4 for before, later in pairwise(beside))


def test_it_is_dropped_when_a_request_needs_its_slots() -> None:
    sizes = {Kind.FULL: 12, Kind.RECURRENT: 24}
    worker = AuditedWorker(HYBRID, sizes=sizes)
    worker.has_auditor = False
    worker.answer("first", STEM)
    worker.answer("second", [*STEM, 4, 4, 2])
    assert worker.seen(AuditReady)
    assert worker.holds()
    worker.answer("large", [3] * 36)
    assert worker.done() == [AuditResult.DROPPED]
    assert not worker.holds()
    assert not worker.scheduler.audits.close("second"), "the comparison counts for nothing"
    assert worker.tokens["large"] == worker.expected("large")


def test_it_waits_for_memory_that_no_request_had() -> None:
    worker = AuditedWorker(HYBRID)
    worker.has_memory = False
    worker.answer("first", STEM)
    worker.answer("second", [*STEM, 4, 4, 2])
    assert not worker.audited_tokens
    worker.scheduler.audits.prepared("another")
    worker.drain()
    assert not worker.audited_tokens
    worker.scheduler.audits.prepared("second")
    worker.drain()
    assert [event.request_id for event in worker.compared] == ["second"]


def test_it_is_dropped_when_a_request_needs_its_row() -> None:
    worker = AuditedWorker(HYBRID, max_running=1)
    worker.has_auditor = False
    worker.answer("first", STEM)
    worker.answer("second", [*STEM, 4, 4, 2])
    rows, reservations = worker.scheduler.allocator.rows, worker.scheduler.reservations
    for number in range(rows.num_free + 1):
        asked = request(HYBRID, f"reserved-{number}", [number] * 3)
        reservations.reserve(asked.request_id, asked, worker.now)
    worker.collect()
    assert worker.done() == [AuditResult.DROPPED]
    assert not rows.num_free


def test_an_audit_that_finds_no_slots_is_dropped() -> None:
    sizes = {Kind.FULL: 6, Kind.RECURRENT: 24}
    worker = AuditedWorker(HYBRID, sizes=sizes)
    worker.answer("first", STEM)
    worker.answer("second", [*STEM, 4, 4, 2])
    assert worker.done() == [AuditResult.DROPPED]
    assert not worker.holds()


@pytest.mark.parametrize("act", ["held_units", "Audits._begin", "slots_of"])
def test_an_audit_that_raises_harms_no_request(act: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    worker = AuditedWorker(HYBRID)
    worker.answer("first", STEM)
    monkeypatch.setattr(f"ferryman.schedule.audit.audits.{act}", broken)
    worker.answer("second", [*STEM, 4, 4, 2])
    assert worker.tokens["second"] == worker.expected("second")
    assert {event.request_id for event in worker.seen(RequestFailed)} == {"second audit"}
    assert not worker.holds()


def test_a_cancelled_request_is_not_audited() -> None:
    worker = AuditedWorker(HYBRID)
    worker.answer("first", STEM)
    worker.ask("second", [*STEM, 4, 4, 2], max_tokens=20)
    for _ in range(4):
        worker.plan()
        worker.run_oldest()
    worker.scheduler.cancel("second", worker.now)
    worker.drain()
    assert worker.seen(Finished)[-1].reason is FinishReason.CANCELLED
    assert not worker.seen(AuditReady)


def test_without_a_share_nothing_is_audited() -> None:
    worker = AuditedWorker(HYBRID, share=0.0)
    worker.answer("first", STEM)
    worker.answer("second", [*STEM, 4, 4, 2])
    assert not worker.compared
    assert not worker.done()


@pytest.mark.parametrize("share", [0.01, 0.2, 1.0])
def test_a_share_of_all_names_is_chosen(share: float) -> None:
    names = [f"request-{i}.1" for i in range(20_000)]
    chosen = {name for name in names if is_chosen(name, share)}
    assert len(chosen) == pytest.approx(share * len(names), rel=0.2)
    assert chosen == {name for name in names if is_chosen(name, share)}


@given(st.floats(0.001, 1.0), st.lists(st.tuples(st.booleans(), st.integers(1, 500)), max_size=60))
def test_audits_cost_a_share_and_one_audit_more(
    share: float, works: list[tuple[bool, int]]
) -> None:
    budget, earned, spent, largest = AuditBudget(share), 0, 0, 0
    for is_audit, num_tokens in works:
        if not is_audit:
            budget.earn(num_tokens)
            earned += num_tokens
        elif budget.is_left:
            budget.spend(num_tokens)
            spent, largest = spent + num_tokens, max(largest, num_tokens)
        assert spent <= share * earned + largest + 1e-6


Move = tuple[str, int, int, int]
MOVES = st.tuples(
    st.sampled_from(["ask", "plan", "run", "run", "plan", "cancel", "flush"]),
    st.integers(0, 2),
    st.integers(1, 14),
    st.integers(1, 9),
)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(list(MANIFESTS.values())),
    st.sampled_from([0.3, 1.0]),
    st.booleans(),
    st.booleans(),
    st.lists(MOVES, min_size=10, max_size=90),
)
def test_audits_keep_their_promises(
    manifest: StateManifest, share: float, overlap: bool, compares: bool, moves: list[Move]
) -> None:
    """All leases come back, no prompt waits for an audit, one audit at a time, all found equal."""
    sizes = {Kind.FULL: 14, Kind.WINDOW: 30, Kind.RECURRENT: 14}
    worker = AuditedWorker(manifest, share, sizes=sizes, overlap=overlap, max_running=3)
    worker.has_auditor = compares
    for number, (move, stem, length, max_tokens) in enumerate(moves):
        if move == "ask":
            asked = request(manifest, f"r{number}", [stem + 1] * length, max_tokens)
            stops = fake_tokens(asked.token_ids, max_tokens, worker.vocab_size)[4:5]
            worker.submit(replace(asked, stop_token_ids=frozenset(stops)))
        elif move == "plan":
            waited = bool(worker.scheduler.sequences.waiting)
            before = len(worker.steps)
            worker.plan()
            for step in worker.steps[before:]:
                assert not (waited and isinstance(step, AuditStep)), "a prompt waits for an audit"
                if isinstance(step, AuditStep):
                    assert step.chunks[0].end - step.chunks[0].start <= CHUNK_TOKENS
        elif move == "run":
            worker.run_oldest()
        elif move == "cancel":
            worker.scheduler.cancel(f"r{stem}", worker.now)
        else:
            worker.scheduler.flush()
        assert len({holder for _, holder in worker.scheduler.audits.leases()}) <= 1
    worker.drain()
    for name, asked in worker.requests.items():
        if len(worker.tokens[name]) == asked.sampling.max_tokens:
            assert worker.tokens[name] == worker.expected(name)
    for ready in worker.seen(AuditReady):
        worker.scheduler.audits.close(ready.request_id)
    worker.scheduler.audits.drop()
    worker.drain()
    assert not worker.holds()
