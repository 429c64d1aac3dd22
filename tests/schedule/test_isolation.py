"""An error that a request causes ends that request only, at every stage of the schedule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from tests.harness.schedule import (
    HYBRID,
    MANIFESTS,
    RandomDrafts,
    ScheduledWorker,
    request,
)

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.cache.planner import Planner
from ferryman.cache.slots import Pools
from ferryman.errors import NonFiniteLogits
from ferryman.schedule import decode, prefill
from ferryman.schedule.batch import NO_TOKEN, Sampled
from ferryman.schedule.decode import DecodeSteps
from ferryman.schedule.drafting import NO_DRAFTS, Drafting
from ferryman.schedule.events import Finished, RequestFailed
from ferryman.schedule.postprocess import Postprocessor
from ferryman.schedule.request_table import SequenceTable
from ferryman.schedule.retraction import Retraction
from ferryman.schedule.sequence import Goal
from ferryman.schedule.slot_allocator import SlotAllocator
from ferryman.schedule.tree_publisher import TreePublisher
from ferryman.schedule.verification import Verification

ROOM = {Kind.FULL: 40, Kind.WINDOW: 40, Kind.RECURRENT: 60}
GUILTY = "r1"
PROMPTS = {"r0": [1] * 13, GUILTY: [2] * 14, "r2": [3] * 21}


class BrokenPart(RuntimeError):
    """The error that these tests raise."""


@dataclass
class Thrower:
    """Makes a function raise for the guilty request, before or after its work."""

    keys: tuple[PageKey, ...]
    num_thrown: int = 0

    def plant(self, to: pytest.MonkeyPatch, owner: Any, name: str, *, behind: bool) -> None:
        original = getattr(owner, name)

        def throwing(*args: Any, **kwargs: Any) -> Any:
            is_guilty = any(map(self._is_about_it, args))
            found = original(*args, **kwargs) if behind or not is_guilty else None
            if is_guilty:
                self.num_thrown += 1
                raise BrokenPart(name)
            return found

        to.setattr(owner, name, throwing)

    def _is_about_it(self, value: object) -> bool:
        asked = getattr(value, "request", value)
        return getattr(asked, "request_id", None) == GUILTY or value == self.keys


PLACES: dict[str, tuple[Any, str, Drafting]] = {
    "admission: planning": (Planner, "plans", NO_DRAFTS),
    "admission: pinning": (SlotAllocator, "_pin", NO_DRAFTS),
    "admission: settling in": (SlotAllocator, "_settle", NO_DRAFTS),
    "admission: its row": (SlotAllocator, "_fill_row", NO_DRAFTS),
    "plan: a chunk": (prefill, "cut_chunk", NO_DRAFTS),
    "plan: its first operations": (prefill, "first_chunk_ops", NO_DRAFTS),
    "plan: room to grow": (decode, "try_grow", NO_DRAFTS),
    "plan: a track slot": (Verification, "track", NO_DRAFTS),
    "plan: drafts": (DecodeSteps, "_drafts_of", RandomDrafts(3, seed=1)),
    "commit: a resume point": (TreePublisher, "publish_point", NO_DRAFTS),
    "commit: the prompt": (TreePublisher, "publish_prompt", NO_DRAFTS),
    "commit: a token": (Postprocessor, "_append_token", NO_DRAFTS),
    "commit: a verified run": (Verification, "settle", RandomDrafts(3, seed=1)),
    "end: what is donated": (TreePublisher, "donate", NO_DRAFTS),
}


def everyone_else_is_answered(worker: ScheduledWorker) -> None:
    for request_id in set(worker.requests) - {GUILTY}:
        assert worker.tokens[request_id] == worker.expected(request_id)
    assert {event.request_id for event in worker.seen(Finished)} >= set(worker.requests) - {GUILTY}


def nothing_is_held(worker: ScheduledWorker) -> None:
    worker.scheduler.check_integrity()
    for ledger in worker.scheduler.ledgers().values():
        assert ledger.balances
        assert set(ledger.by_role) <= {"tree"}
    worker.scheduler.flush()
    assert all(ledger.leased == 0 for ledger in worker.scheduler.ledgers().values())


@pytest.mark.parametrize("behind", [False, True], ids=["before it", "behind it"])
@pytest.mark.parametrize("overlap", [False, True], ids=["one step at a time", "overlap"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", sorted(MANIFESTS))
def test_an_error_of_one_request_ends_that_request_alone(
    name: str, place: str, overlap: bool, behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, function, drafting = PLACES[place]
    manifest = MANIFESTS[name]
    if function == "track" and Kind.RECURRENT not in manifest.kinds:
        pytest.skip("nothing to track")
    room = {kind: ROOM[kind] for kind in manifest.kinds}
    worker = ScheduledWorker(manifest, room, overlap=overlap, drafting=drafting)
    worker.submit(request(manifest, "before", PROMPTS[GUILTY][:9]))
    worker.drain()
    worker.submit(request(manifest, "r0", PROMPTS["r0"], 12))
    guilty = request(manifest, GUILTY, PROMPTS[GUILTY], 12)
    thrower = Thrower(guilty.keys)
    thrower.plant(monkeypatch, owner, function, behind=behind)
    worker.submit(guilty)
    worker.submit(request(manifest, "r2", PROMPTS["r2"], 12))
    worker.drain()
    assert thrower.num_thrown == 1, "it threw, and nothing of it was tried again"
    (failed,) = worker.seen(RequestFailed)
    assert failed.request_id == GUILTY
    assert isinstance(failed.error, BrokenPart)
    everyone_else_is_answered(worker)
    nothing_is_held(worker)


def hybrid(full: int = 40, overlap: bool = True) -> ScheduledWorker:
    manifest = HYBRID
    return ScheduledWorker(manifest, {Kind.FULL: full, Kind.RECURRENT: 60}, overlap=overlap)


@pytest.mark.parametrize("place", ["received_prompt_ops", "adopt", "publish_prompt"])
def test_a_hand_off_that_fails_when_it_is_taken_ends_alone(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = hybrid()
    owners: dict[str, Any] = {
        "received_prompt_ops": decode,
        "adopt": SequenceTable,
        "publish_prompt": TreePublisher,
    }
    guilty = request(worker.manifest, GUILTY, PROMPTS[GUILTY], 12)
    worker.submit(request(worker.manifest, "r0", PROMPTS["r0"], 12))
    worker.plan()
    worker.scheduler.reservations.reserve("promise", guilty, worker.now)
    thrower = Thrower(guilty.keys)
    thrower.plant(monkeypatch, owners[place], place, behind=place == "adopt")
    worker.scheduler.adopt("promise", Sampled(7, {}), worker.now)
    worker.drain()
    assert thrower.num_thrown == 1
    assert [event.request_id for event in worker.seen(RequestFailed)] == [GUILTY]
    everyone_else_is_answered(worker)
    nothing_is_held(worker)


def test_a_cancel_that_fails_ends_the_request_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = hybrid()
    guilty = request(worker.manifest, GUILTY, PROMPTS[GUILTY], 12)
    for asked in (guilty, request(worker.manifest, "r0", PROMPTS["r0"], 12)):
        worker.submit(asked)
    while not worker.tokens[GUILTY]:
        worker.plan()
        worker.run_oldest()
    thrower = Thrower(guilty.keys)
    thrower.plant(monkeypatch, TreePublisher, "donate", behind=False)
    assert worker.scheduler.cancel(GUILTY, worker.now)
    assert thrower.num_thrown == 1
    worker.drain()
    assert [event.request_id for event in worker.seen(RequestFailed)] == [GUILTY]
    everyone_else_is_answered(worker)
    nothing_is_held(worker)


@pytest.mark.parametrize("overlap", [False, True], ids=["one step at a time", "overlap"])
def test_a_retraction_that_fails_ends_who_was_to_be_retracted(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = hybrid(full=9, overlap=overlap)
    asked = [request(worker.manifest, f"r{i}", [i] * (5 + i), 18) for i in (0, 2, 1)]
    thrower = Thrower(asked[-1].keys)
    thrower.plant(monkeypatch, Retraction, "push_back", behind=False)
    for each in asked:
        worker.submit(each)
    worker.drain()
    assert thrower.num_thrown == 1, "the newest was to be pushed back"
    assert [event.request_id for event in worker.seen(RequestFailed)] == [GUILTY]
    everyone_else_is_answered(worker)
    nothing_is_held(worker)


def test_what_a_worker_does_with_an_event_ends_its_request_alone() -> None:
    worker = hybrid()
    for name in ("r0", GUILTY):
        worker.submit(request(worker.manifest, name, PROMPTS[name], 12))
    worker.plan()
    worker.run_oldest()

    def hear(_event: str) -> None:
        raise BrokenPart("heard")

    worker.scheduler.isolate(GUILTY, hear, "an event")
    worker.drain()
    (failed,) = worker.seen(RequestFailed)
    assert failed.request_id == GUILTY
    everyone_else_is_answered(worker)
    nothing_is_held(worker)


def run_without_looking(worker: ScheduledWorker) -> None:
    """As `drain`, which looks after every step whether all is well."""
    while (plan := worker.scheduler.plan(worker.now)) is not None:
        worker.scheduler.commit(plan, worker.engine.run(plan), worker.now)


def test_an_error_that_leaves_slots_and_tree_at_odds_is_not_the_requests_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tree has slots by then that are still leased to the request."""
    worker = hybrid()

    def throwing(_pools: Pools, *_: Any) -> None:
        raise BrokenPart("move")

    worker.submit(request(worker.manifest, GUILTY, PROMPTS[GUILTY], 12))
    monkeypatch.setattr(Pools, "move", throwing)
    with pytest.raises(AssertionError, match="tree"):
        run_without_looking(worker)


def test_a_chunk_that_fails_leaves_no_operation_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slots are free at once, and the next in line may have them in the same step."""
    worker = hybrid()
    guilty = request(worker.manifest, GUILTY, PROMPTS[GUILTY], 12)
    thrower = Thrower(guilty.keys)
    thrower.plant(monkeypatch, prefill, "first_chunk_ops", behind=True)
    worker.submit(guilty)
    worker.submit(request(worker.manifest, "r2", PROMPTS["r2"], 12))
    worker.plan()
    assert thrower.num_thrown == 1
    (plan,) = worker.queued
    assert len(plan.ops.clears) == 1, "of the one that is in the step"


@pytest.mark.parametrize("goal", list(Goal), ids=str)
def test_a_prompt_without_numbers_is_neither_cached_nor_handed_off(goal: Goal) -> None:
    worker = hybrid()
    guilty = request(worker.manifest, GUILTY, PROMPTS[GUILTY][:8], 12)
    worker.submit(guilty, goal)
    assert worker.plan()
    plan = worker.queued.popleft()
    outcome = worker.engine.run(plan)
    assert len(outcome.sampled) == 1
    spoilt = replace(outcome, sampled=(Sampled(NO_TOKEN, {}),))
    worker.scheduler.commit(plan, spoilt, worker.now)
    worker.collect()
    (failed,) = worker.seen(RequestFailed)
    assert isinstance(failed.error, NonFiniteLogits)
    assert not worker.scheduler.chain_units(guilty.keys), "nobody shall resume from it"
    nothing_is_held(worker)
