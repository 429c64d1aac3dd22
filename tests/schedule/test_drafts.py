"""Drafts in the schedule: runs of tokens, scratch slots, tracks at exact page ends, no trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from tests.doubles.stamps import fake_tokens
from tests.harness.schedule import (
    HYBRID,
    MANIFESTS,
    RandomDrafts,
    ScheduledWorker,
    request,
)

from ferryman.cache.keys import page_keys, root_key
from ferryman.cache.manifest import Kind
from ferryman.cache.slots import TREE
from ferryman.errors import InvalidRequest
from ferryman.schedule.batch import DecodeStep
from ferryman.schedule.drafting import NOTHING_PROPOSED, Drafting, ModelDrafts, Proposals
from ferryman.schedule.events import Finished, Retracted
from ferryman.schedule.request import FinishReason, Request
from ferryman.schedule.sequence import Goal

PAGE = 4
SIZES = {Kind.FULL: 60, Kind.WINDOW: 60, Kind.RECURRENT: 60}
every_manifest = pytest.mark.parametrize("name", sorted(MANIFESTS))


@dataclass(frozen=True, slots=True)
class Runs:
    """As many drafts as there may be; of step i of a request, the first `right[i]` are."""

    num_tokens: int
    right: tuple[int, ...]

    def begin(self, request: Request) -> Proposals:
        return _InRuns(self, request.token_ids.tolist())


class _InRuns:
    def __init__(self, runs: Runs, prompt: Sequence[int]) -> None:
        self._right, self._prompt = list(runs.right), list(prompt)

    def propose(self, drawn: Sequence[int], most: int) -> Sequence[int]:
        right = self._right.pop(0) if self._right else 0
        tokens = fake_tokens([*self._prompt, *drawn], most, 50)
        return [t if i < right else (t + 1) % 50 for i, t in enumerate(tokens)]


def a_worker(
    name: str, drafting: Drafting, *, overlap: bool = True, full: int = 60
) -> ScheduledWorker:
    manifest = MANIFESTS[name]
    sizes = SIZES | {Kind.FULL: full}
    return ScheduledWorker(manifest, sizes, overlap=overlap, drafting=drafting, max_running=6)


def decode_steps(worker: ScheduledWorker) -> list[DecodeStep]:
    """Runs to the end; all decode steps on the way."""
    seen = []
    while worker.plan() or worker.queued:
        seen += [step for step in list(worker.queued)[-1:] if isinstance(step, DecodeStep)]
        worker.run_oldest()
    return seen


def snapshots_in_tree(worker: ScheduledWorker, tokens: Sequence[int]) -> list[int]:
    """Positions of this text at which the tree holds a state, checked against its stamp."""
    ids = np.array(tokens, dtype="<u4")
    tree = worker.scheduler.allocator.tree
    found = []
    for page, key in enumerate(page_keys(root_key(worker.manifest), ids, PAGE)):
        if tree.has(Kind.RECURRENT, key):
            slot = tree.slot(Kind.RECURRENT, key).slot
            stamp, position = worker.engine.slabs.stamps(Kind.RECURRENT)[slot, :2].tolist()
            row = ScheduledWorker(worker.manifest, SIZES).engine._rows[0]
            row.write(0, ids)
            assert (stamp, position) == (int(row.hashes(position)[-1]), (page + 1) * PAGE)
            found.append(position)
    return found


@every_manifest
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one step at a time"])
def test_right_drafts_are_tokens_that_cost_no_step(name: str, overlap: bool) -> None:
    worker = a_worker(name, RandomDrafts(3, chance=1.0), overlap=overlap)
    worker.submit(request(worker.manifest, "r0", [1] * 6, max_tokens=17))
    steps = decode_steps(worker)
    assert worker.tokens["r0"] == worker.expected("r0")
    assert [len(step.drafts) for step in steps] == [3, 3, 3, 3], "16 tokens behind the first one"
    counts = worker.scheduler.statistics().drafts
    assert (counts.steps, counts.drafted, counts.accepted) == (4, 12, 12), "four tokens a step"


@every_manifest
def test_wrong_drafts_cost_nothing_but_their_place_in_the_batch(name: str) -> None:
    worker = a_worker(name, RandomDrafts(3, chance=0.0))
    worker.submit(request(worker.manifest, "r0", [1] * 6, max_tokens=17))
    decode_steps(worker)
    assert worker.tokens["r0"] == worker.expected("r0")
    counts = worker.scheduler.statistics().drafts
    assert counts.drafted > 10
    assert (counts.steps, counts.accepted) == (16, 0)


@pytest.mark.parametrize("right", [(0, 1, 2, 3, 4, 5), (5, 4, 3, 2, 1, 0), (2, 2, 2, 2, 2, 2, 2)])
@every_manifest
def test_what_was_cut_off_in_the_middle_leaves_no_trace(name: str, right: tuple[int, ...]) -> None:
    """Every read of the steps that follow asserts the stamp it needs."""
    worker = a_worker(name, Runs(5, right))
    worker.submit(request(worker.manifest, "r0", [1] * 6, max_tokens=30))
    decode_steps(worker)
    assert worker.tokens["r0"] == worker.expected("r0")
    assert worker.scheduler.statistics().drafts.accepted == sum(right)


@pytest.mark.parametrize("max_tokens", range(1, 14))
def test_no_draft_lies_behind_the_last_token(max_tokens: int) -> None:
    worker = a_worker("all kinds", RandomDrafts(4, chance=1.0))
    worker.submit(request(worker.manifest, "r0", [2] * 5, max_tokens))
    steps = decode_steps(worker)
    assert worker.tokens["r0"] == worker.expected("r0")
    assert sum(len(step.draws) for step in steps) == max_tokens - 1


@pytest.mark.parametrize("at", range(1, 12))
def test_a_stop_token_within_a_run_ends_the_request_there(at: int) -> None:
    worker = a_worker("hybrid", RandomDrafts(4, chance=1.0))
    asked = request(worker.manifest, "r0", [2] * 5, 20)
    expected = fake_tokens(asked.token_ids, 20, 50)
    stop = expected[at]
    worker.submit(replace(asked, stop_token_ids=frozenset({stop})))
    decode_steps(worker)
    assert worker.tokens["r0"] == expected[: expected.index(stop) + 1]
    (finished,) = worker.seen(Finished)
    assert finished.reason is FinishReason.STOP
    known = [*asked.token_ids.tolist(), *worker.tokens["r0"][:-1]]
    assert max(snapshots_in_tree(worker, known)) == len(known) // PAGE * PAGE


# Snapshots: the same as those of plain decoding, and each at its exact position.


@pytest.mark.parametrize("drafting", [RandomDrafts(3), RandomDrafts(6, chance=0.9), ModelDrafts(5)])
@pytest.mark.parametrize("max_tokens", range(2, 26))
def test_the_tree_holds_the_snapshots_of_plain_decoding(
    max_tokens: int, drafting: Drafting
) -> None:
    found = []
    for worker in (
        ScheduledWorker(HYBRID, SIZES, overlap=False),
        a_worker("hybrid", drafting, overlap=False),
    ):
        worker.submit(request(worker.manifest, "r0", [3] * 6, max_tokens))
        worker.drain()
        found.append(snapshots_in_tree(worker, [*[3] * 6, *worker.tokens["r0"]]))
    assert found[0] == found[1]


def test_a_state_on_the_way_is_donated_without_a_copy() -> None:
    """The page ends within the run of drafts: its scratch slot becomes the tree's."""
    worker = a_worker("hybrid", Runs(5, (5,)), overlap=False)
    worker.submit(request(worker.manifest, "r0", [1] * 5, max_tokens=7))
    (step,) = decode_steps(worker)
    assert len(step.drafts) == 5
    assert step.ops.saves == step.ops.snapshots == ()
    assert worker.engine.once.num_consumed == 2, "the working slot's clear, the prompt's snapshot"
    # The run consumed the tokens at 5 to 10, so the state at 8 is the one behind draft 2.
    ids = np.array([*[1] * 5, *worker.tokens["r0"]], dtype="<u4")
    key = page_keys(root_key(worker.manifest), ids, PAGE)[1]
    assert worker.scheduler.allocator.tree.slot(Kind.RECURRENT, key).slot == step.write_slots[2]


def test_a_run_that_ends_on_a_pages_end_is_saved_by_the_next_step_once() -> None:
    worker = a_worker("hybrid", Runs(2, (2, 0, 0, 0)), overlap=False)
    worker.submit(request(worker.manifest, "r0", [1] * 5, max_tokens=6))
    first, second, *_ = decode_steps(worker)
    assert first.ops.saves == ()
    (save,) = second.ops.saves
    assert (save.position, save.src) == (8, second.read_slots[0])
    assert save.dst not in second.write_slots
    before = worker.engine.once.num_consumed
    worker.engine.once.consume(second)
    assert worker.engine.once.num_consumed == before


def test_a_request_that_ends_on_a_pages_end_gives_its_working_slot() -> None:
    worker = a_worker("hybrid", Runs(2, (2,)), overlap=False)
    worker.submit(request(worker.manifest, "r0", [1] * 5, max_tokens=4))
    (step,) = decode_steps(worker)
    known = [*[1] * 5, *worker.tokens["r0"]][:-1]
    assert snapshots_in_tree(worker, known) == [4, 8]
    assert step.ops.saves == ()


def test_a_save_on_its_way_is_nobodys_yet_when_the_request_is_cancelled() -> None:
    """Defect 1, with drafts: the tree must not hold what a step in flight has yet to write."""
    worker = a_worker("hybrid", Runs(2, (2, 0)), overlap=False)
    worker.submit(request(worker.manifest, "r0", [1] * 5, max_tokens=9))
    while not (worker.queued and worker.queued[-1].ops.saves):
        worker.run_oldest()
        worker.plan()
    (save,) = worker.queued[-1].ops.saves
    worker.scheduler.cancel("r0", worker.now)
    worker.collect()
    pool = worker.scheduler.allocator.pools[Kind.RECURRENT]
    held = [h for h in worker.scheduler.allocator.tree.handles() if h.kind is Kind.RECURRENT]
    assert save.dst not in [handle.slot for handle in held]
    assert all(pool.holders(handle) == (TREE,) for handle in held)
    worker.drain()
    assert snapshots_in_tree(worker, [*[1] * 5, *worker.tokens["r0"]]) == [4]


# With others.


@every_manifest
def test_drafts_do_not_wait_for_who_has_none(name: str) -> None:
    """Requests of many lengths: waves shrink, the order within each stays."""
    worker = a_worker(name, RandomDrafts(4, seed=5))
    for index in range(6):
        worker.submit(request(worker.manifest, f"r{index}", [index] * (3 + index), 9 + index))
    steps = decode_steps(worker)
    assert any(len(set(step.verify_depths)) > 2 for step in steps)
    for step in steps:
        assert list(step.verify_depths) == sorted(step.verify_depths, reverse=True)
    for index in range(6):
        assert worker.tokens[f"r{index}"] == worker.expected(f"r{index}")


def test_requests_that_draft_go_together_and_never_twice_at_once() -> None:
    worker = a_worker("hybrid", RandomDrafts(3, seed=1), overlap=True)
    for index in range(4):
        worker.submit(request(worker.manifest, f"r{index}", [index] * 5, 12))
    while worker.plan() or worker.queued:
        flying = [step for step in worker.queued if isinstance(step, DecodeStep)]
        assert len(flying) <= 1, "the plan of a second one would need tokens that nobody knows"
        worker.run_oldest()


@dataclass(frozen=True, slots=True)
class Some:
    """Requests whose prompt begins with an even token do not draft."""

    num_tokens: int = 3

    def begin(self, request: Request) -> Proposals:
        return RandomDrafts(3).begin(request) if request.token_ids[0] % 2 else NOTHING_PROPOSED


def test_requests_that_do_not_draft_overlap_as_ever() -> None:
    worker = a_worker("all kinds", Some(), overlap=True)
    for index in range(4):
        worker.submit(request(worker.manifest, f"r{index}", [index] * 5, 12))
    most = 0
    while any([worker.plan(), worker.plan()]) or worker.queued:
        flying = [step for step in worker.queued if isinstance(step, DecodeStep)]
        most = max(most, len(flying))
        names = [name for step in flying for name in step.request_ids]
        assert all(names.count(name) <= 1 for name in ("r1", "r3"))
        worker.run_oldest()
    assert most == 2
    for index in range(4):
        assert worker.tokens[f"r{index}"] == worker.expected(f"r{index}")


def test_a_request_with_one_token_to_draw_takes_no_scratch_slot() -> None:
    worker = a_worker("hybrid", RandomDrafts(3, chance=1.0))
    worker.submit(request(worker.manifest, "r0", [1] * 5, max_tokens=1))
    worker.plan()
    (sequence,) = worker.scheduler.sequences.by_id.values()
    assert not sequence.drafts
    assert sequence.scratch == []
    worker.drain()
    assert worker.tokens["r0"] == worker.expected("r0")


def test_a_prompt_to_hand_off_takes_no_scratch_slot() -> None:
    worker = a_worker("hybrid", RandomDrafts(3))
    worker.submit(request(worker.manifest, "r0", [1] * 5, 9), goal=Goal.HAND_OFF)
    worker.drain()
    (sequence,) = worker.scheduler.sequences.by_id.values()
    assert sequence.scratch == []


@every_manifest
def test_scratch_slots_are_taken_with_all_others_or_nothing_is(name: str) -> None:
    worker = a_worker(name, RandomDrafts(3))
    for index in range(3):
        worker.submit(request(worker.manifest, f"r{index}", [index] * 5, 9))
    worker.plan()
    for sequence in worker.scheduler.sequences.by_id.values():
        assert len(sequence.scratch) == (3 if Kind.RECURRENT in worker.manifest.kinds else 0)
        owner = (sequence.holder,)
        pools = worker.scheduler.allocator.pools
        assert all(pools[handle.kind].holders(handle) == owner for handle in sequence.scratch)


def test_a_pool_that_could_never_hold_the_states_of_a_run_refuses_at_the_door() -> None:
    sizes = {Kind.FULL: 20, Kind.RECURRENT: 4}
    worker = ScheduledWorker(HYBRID, sizes, drafting=RandomDrafts(4, chance=1.0))
    with pytest.raises(InvalidRequest, match="needs 5 recurrent slots at once, there are 4"):
        worker.submit(request(worker.manifest, "r0", [1] * 5, max_tokens=9))
    worker.submit(request(worker.manifest, "r1", [1] * 5, max_tokens=4))
    worker.drain()
    assert worker.tokens["r1"] == worker.expected("r1"), "with fewer drafts it fits"


@every_manifest
@pytest.mark.parametrize("drafting", [RandomDrafts(3), RandomDrafts(6, chance=0.9), ModelDrafts(4)])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one step at a time"])
def test_a_request_that_drafts_is_retracted_and_comes_back(
    name: str, drafting: Drafting, overlap: bool
) -> None:
    worker = a_worker(name, drafting, overlap=overlap, full=9)
    for index in range(3):
        worker.submit(request(worker.manifest, f"r{index}", [index] * 6, 18))
    worker.drain()
    assert worker.seen(Retracted), "the pools were meant to run out"
    for index in range(3):
        assert worker.tokens[f"r{index}"] == worker.expected(f"r{index}")
    drafts = [event.drafts for event in worker.seen(Finished)]
    total = worker.scheduler.statistics().drafts
    assert sum(counts.drafted for counts in drafts) == total.drafted
    assert sum(counts.accepted for counts in drafts) == total.accepted > 0


def test_a_row_of_a_finished_request_writes_nowhere() -> None:
    """Defect 40: a request freed while in flight was verified on slot 0 of another request."""
    worker = a_worker("hybrid", RandomDrafts(3, chance=1.0), overlap=True)
    for index in range(2):
        worker.submit(request(worker.manifest, f"r{index}", [index] * 5, 12))
    while not any(isinstance(step, DecodeStep) for step in worker.queued):
        worker.run_oldest()
        worker.plan()
    worker.scheduler.cancel("r0", worker.now)
    worker.submit(request(worker.manifest, "r2", [7] * 9, 9))
    worker.drain()
    for name in ("r1", "r2"):
        assert worker.tokens[name] == worker.expected(name)
    assert all(ledger.balances for ledger in worker.scheduler.ledgers().values())
