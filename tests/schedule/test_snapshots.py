"""Snapshots on the way of a prompt: where they land, what comes with them, when there are fewer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.harness.schedule import ALL_KINDS, HYBRID, ScheduledWorker, request

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.resume import resume_set
from ferryman.schedule.events import SequenceAdmitted
from ferryman.schedule.request import Pin

ROOM = {Kind.FULL: 40, Kind.WINDOW: 60, Kind.RECURRENT: 24}


def worker_for(
    manifest: StateManifest, *, overlap: bool = True, grid: int = 8, **sizes: int
) -> ScheduledWorker:
    asked = ROOM | {Kind(name): sizes[name] for name in sizes}
    return ScheduledWorker(manifest, asked, overlap=overlap, chunk_tokens=12, snapshot_grid=grid)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one step at a time"])
@pytest.mark.parametrize("manifest", [HYBRID, ALL_KINDS], ids=["hybrid", "all kinds"])
def test_every_snapshot_on_the_way_comes_with_its_window(
    manifest: StateManifest, overlap: bool
) -> None:
    """With overlap the next chunk is planned, and its window slides, before the first commits."""
    worker = worker_for(manifest, overlap=overlap)
    asked = request(manifest, "r0", [1] * 35, 1)
    worker.submit(asked)
    while worker.plan() or worker.queued:
        worker.plan()
        worker.run_oldest()
    tree = worker.scheduler.allocator.tree
    for position in (8, 16, 24, 32):
        pages = position // manifest.page_size
        assert tree.has(Kind.RECURRENT, asked.keys[pages - 1])
        window = resume_set(manifest, position).window
        held = [tree.has(Kind.WINDOW, asked.keys[p]) for p in range(window.first, window.end)]
        assert all(held), f"the snapshot at {position} lacks part of its window"


@pytest.mark.parametrize("end", range(9, 36))
def test_any_prompt_that_shares_a_stem_resumes_at_the_last_grid_point_of_it(end: int) -> None:
    worker = worker_for(ALL_KINDS)
    worker.submit(request(ALL_KINDS, "r0", [1] * 36, 1))
    worker.drain()
    worker.submit(request(ALL_KINDS, "r1", [*[1] * end, 2, 2, 2, 2], 3))
    worker.drain()
    (plan,) = [event.plan for event in worker.seen(SequenceAdmitted) if event.request_id == "r1"]
    assert plan.position == (36 if end == 36 else end // 8 * 8)
    assert worker.tokens["r1"] == worker.expected("r1")


@pytest.mark.parametrize("manifest", [HYBRID, ALL_KINDS], ids=["hybrid", "all kinds"])
def test_already_the_second_prompt_behind_a_fork_resumes_there(manifest: StateManifest) -> None:
    """Without a fork point the second finds pages and no state, and the third resumes."""
    system, conversations = [1] * 26, ([5, 6] * 4, [7, 8] * 4, [9, 10] * 4)
    for forks, expected in [((26,), [0, 24, 24]), ((), [0, 0, 24])]:
        worker = worker_for(manifest, grid=0)
        for number, words in enumerate(conversations):
            asked = request(manifest, f"r{number}", [*system, *words], 2)
            worker.submit(replace(asked, fork_points=forks))
            worker.drain()
        positions = [event.plan.position for event in worker.seen(SequenceAdmitted)]
        assert positions == expected
        assert all(tokens == worker.expected(name) for name, tokens in worker.tokens.items())


@pytest.mark.parametrize("seconds", [3600, 0], ids=["pinned", "not pinned"])
def test_a_flood_of_other_prompts_leaves_what_a_caller_marked(seconds: int) -> None:
    """Its time counts from its latest use."""
    worker, system = worker_for(HYBRID, grid=0, recurrent=9), [1] * 17
    pins = (Pin(17, seconds),) if seconds else ()

    def ask(name: str, words: list[int], pins: tuple[Pin, ...] = ()) -> int:
        asked = request(HYBRID, name, words, 1)
        worker.submit(
            replace(asked, fork_points=(17,) if pins or name[0] == "m" else (), pins=pins)
        )
        worker.drain()
        admitted = {event.request_id: event.plan for event in worker.seen(SequenceAdmitted)}
        return admitted[name].position

    ask("marked", [*system, 5, 6, 7, 8], pins)
    for number in range(12):
        ask(f"other-{number}", [7, number, *[3] * 24])
    assert ask("again", [*system, 9, 9, 9, 9]) == (16 if seconds else 0)


@pytest.mark.parametrize("manifest", [HYBRID, ALL_KINDS], ids=["hybrid", "all kinds"])
def test_a_prompt_that_ends_with_a_page_serves_its_repeat_and_the_next_turn(
    manifest: StateManifest,
) -> None:
    worker, prompt = worker_for(manifest, grid=0), [1] * 36
    worker.submit(request(manifest, "first", prompt, 1))
    worker.drain()
    worker.submit(request(manifest, "repeat", prompt, 1))
    worker.submit(request(manifest, "turn", [*prompt, *worker.tokens["first"], 5, 6], 3))
    worker.drain()
    plans = {event.request_id: event.plan for event in worker.seen(SequenceAdmitted)}
    assert plans["first"].snapshots == (32, 36)
    assert (plans["repeat"].position, plans["repeat"].snapshots) == (32, ())
    assert plans["turn"].position == 36
    assert all(worker.tokens[name] == worker.expected(name) for name in plans)


@pytest.mark.parametrize(
    ("recurrent", "expected"),
    [(16, (8, 16, 24, 32)), (12, (16, 32)), (3, (16, 32)), (2, (32,)), (1, ())],
)
def test_a_prompt_takes_the_snapshots_that_the_pool_can_give(
    recurrent: int, expected: tuple[int, ...]
) -> None:
    """Of 16 slots one path may keep four; of two, one is the request's own; of one, it is all."""
    worker = worker_for(HYBRID, recurrent=recurrent)
    worker.submit(request(HYBRID, "r0", [1] * 33, 3))
    worker.drain()
    (admitted,) = worker.seen(SequenceAdmitted)
    assert admitted.plan.snapshots == expected
    assert worker.tokens["r0"] == worker.expected("r0")
