"""Rows 37, 40 and 41: steps on their way, and what is planned, shared or freed meanwhile."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from tests.harness.schedule import (
    HYBRID,
    MANIFESTS,
    PAGE,
    RandomDrafts,
    WatchedWorker,
    is_all_cached,
    request,
)

from ferryman.cache.manifest import Kind
from ferryman.schedule.drafting import NO_DRAFTS
from ferryman.schedule.rows import NO_SLOT

ROOM = {Kind.FULL: 60, Kind.WINDOW: 40, Kind.RECURRENT: 24}


# Row 37: a page's key names all before it and its place, so whose slot it is does not matter.


@pytest.mark.parametrize("name", sorted(MANIFESTS))
@pytest.mark.parametrize("chunk_tokens", [4, 8, 13, 64])
def test_row_37_two_prompts_planned_before_either_is_cached_share_one_chain(
    name: str, chunk_tokens: int
) -> None:
    """Both compute the stem in pipelined steps; the later one goes on with the earlier's pages."""
    worker = WatchedWorker(MANIFESTS[name], ROOM, chunk_tokens=chunk_tokens)
    for index in range(3):
        worker.submit(request(worker.manifest, f"r{index}", [1] * 18 + [index], 9))
    worker.drain()
    for request_id in worker.requests:
        assert worker.tokens[request_id] == worker.expected(request_id)
    assert is_all_cached(worker)
    tree, keys = worker.scheduler.allocator.tree, worker.requests["r0"].keys
    slots = [tree.slot(Kind.FULL, key).slot for key in keys[:4]]
    assert len(set(slots)) == 4
    chains = {worker.requests[name].keys[:4] for name in worker.requests}
    assert chains == {keys[:4]}


# Row 40: nothing is a place to write to, not slot 0.


@pytest.mark.parametrize("name", sorted(MANIFESTS))
@pytest.mark.parametrize("drafts", [0, 3])
def test_row_40_a_request_freed_under_way_writes_to_nobodys_slot(name: str, drafts: int) -> None:
    """Cancelled with a step in flight; the next takes its row and its slots, slot 0 among them."""
    drafting = RandomDrafts(drafts) if drafts else NO_DRAFTS
    for steps, overlap in product(range(1, 8), (True, False)):
        worker = WatchedWorker(MANIFESTS[name], ROOM, overlap=overlap, drafting=drafting)
        worker.submit(request(worker.manifest, "goes", [1] * 6, 20))
        worker.submit(request(worker.manifest, "stays", [2] * 6, 20))
        for _ in range(steps):
            worker.plan()
            worker.run_oldest()
        worker.plan()
        worker.scheduler.cancel("goes", worker.now)
        worker.collect()
        worker.submit(request(worker.manifest, "next", [3] * 9, 9))
        worker.drain()
        for request_id in ("stays", "next"):
            assert worker.tokens[request_id] == worker.expected(request_id)
        assert_rows_name_nothing(worker)


def assert_rows_name_nothing(worker: WatchedWorker) -> None:
    rows = worker.scheduler.allocator.rows
    everybody = np.arange(rows.num_free)
    for table in rows.page_tables(everybody, 10).values():
        assert (table == NO_SLOT).all()
    assert (rows.states == NO_SLOT).all()


# Row 41: a track slot that is written again loses its name before the write is on its way.


@pytest.mark.parametrize("recurrent", [1, 2, 3])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one step"])
@pytest.mark.parametrize("drafts", [0, 1])
def test_row_41_what_is_cached_is_never_a_slot_that_a_step_still_writes(
    recurrent: int, overlap: bool, drafts: int
) -> None:
    """None, one or two slots for tracks: a second one is not to be had. Cancelled at every step,
    it leaves a state in the tree that is that of its prefix, and stays so while steps run out."""
    if recurrent <= drafts:
        return
    snapshots = set()
    for steps in range(1, 26):
        worker = WatchedWorker(
            HYBRID,
            {Kind.FULL: 40, Kind.RECURRENT: recurrent},
            overlap=overlap,
            max_prealloc=0,  # a slot that is kept for a hand-off is no track
            drafting=RandomDrafts(drafts) if drafts else NO_DRAFTS,
        )
        worker.submit(request(HYBRID, "r0", [1] * 6, 18))
        for _ in range(steps):
            worker.plan()
            worker.run_oldest()
        worker.plan()
        worker.scheduler.cancel("r0", worker.now)
        worker.collect()
        worker.drain()
        assert is_all_cached(worker)
        tree = worker.scheduler.allocator.tree
        held = [key for kind, key in tree.units() if kind is Kind.RECURRENT]
        snapshots |= {tree.node(key).depth * PAGE for key in held}
    if recurrent > 1 + drafts:
        assert snapshots >= {8, 12, 16, 20}, "tracks were meant to be cached at every page's end"
