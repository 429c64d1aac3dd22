"""Defects that the scheduler had, each by the test that showed it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.doubles.stamps import fake_manifest
from tests.harness.schedule import HYBRID, ScheduledWorker, request, worker_for

from ferryman.cache.capacity import Concurrency, plan_capacity, tracking_slots
from ferryman.cache.keys import page_keys, root_key
from ferryman.cache.manifest import Kind
from ferryman.cache.planner import Planner
from ferryman.cache.resume import Reason, ResumeCosts
from ferryman.errors import ConfigError, OutOfSlots
from ferryman.schedule.events import Retracted


def test_pages_decoded_for_a_tenant_are_filed_under_its_own_root() -> None:
    worker = worker_for(HYBRID)
    salt = b"another tenant"
    asked = replace(request(worker.manifest, "r0", [1] * 3, 14), tenant_salt=salt)
    worker.submit(asked)
    worker.drain()
    told = [1] * 3 + worker.tokens["r0"]
    tree = worker.scheduler.allocator.tree
    assert tree.match_depth(request(worker.manifest, "", told).keys) == 0
    theirs = request(worker.manifest, "", told).token_ids
    assert tree.match_depth(page_keys(root_key(worker.manifest, salt), theirs, 4)) > 0


def test_a_reservation_does_not_overtake_what_was_retracted() -> None:
    manifest = HYBRID
    worker = ScheduledWorker(manifest, {Kind.FULL: 9, Kind.RECURRENT: 12})
    for index in range(3):
        worker.submit(request(manifest, f"r{index}", [index] * 6, max_tokens=18))
    for _ in range(200):
        worker.plan()
        worker.run_oldest()
        if worker.seen(Retracted) and worker.scheduler.statistics().waiting:
            break
    assert worker.scheduler.statistics().waiting, "somebody was meant to be pushed back"
    with pytest.raises(OutOfSlots, match="wait"):
        worker.scheduler.reservations.reserve(
            "res", request(manifest, "new", [7, 7, 7], 2), worker.now
        )
    worker.drain()
    worker.scheduler.reservations.reserve("res", request(manifest, "new", [7, 7, 7], 2), worker.now)


@pytest.mark.parametrize("step_tokens", [4, 5, 8, 11])
@pytest.mark.parametrize("window_len", [1, 4, 5, 9])
def test_whatever_the_budget_an_idle_worker_admits_the_longest_prompt(
    step_tokens: int, window_len: int
) -> None:
    manifest = fake_manifest(4, kinds=list(Kind), window_len=window_len)
    alone = Concurrency(1, 0, tracking_slots(prefix_cache=True, overlap=True))
    planner = Planner(manifest, ResumeCosts(1.0, 1.0), step_tokens)
    num_tried = 0
    for memory_bytes in range(0, 64 * 64, 64):
        try:
            pools = plan_capacity(manifest, memory_bytes, alone, step_tokens)
        except ConfigError:
            continue
        cold = planner.plan_cold(pools.max_tokens(manifest), Reason.NO_ROOM)
        assert all(count <= pools.slots[kind] for kind, count in cold.demand.items())
        num_tried += 1
    assert num_tried > 10


def test_a_request_that_cannot_be_admitted_evicts_nothing() -> None:
    """Two run, the head of the line needs more than what they leave: the cache stays as it is."""
    manifest = HYBRID
    worker = worker_for(manifest, full=20, recurrent=24)
    worker.submit(request(manifest, "cached", [5] * 14, 1))
    worker.drain()
    for index in range(2):
        worker.submit(request(manifest, f"r{index}", [index] * 14, 8))
        worker.plan()
        worker.run_oldest()
    worker.submit(request(manifest, "head", [7] * 50, 1))
    cached = list(worker.scheduler.allocator.tree.units())
    for _ in range(3):
        worker.plan()
        worker.run_oldest()
        assert worker.scheduler.statistics().waiting == 1, "the head is meant to wait"
        units = set(worker.scheduler.allocator.tree.units())
        assert units.issuperset(cached), "it took cached pages and still waits"
    worker.drain()
    assert worker.tokens["head"] == worker.expected("head")
