"""Window state end to end in the schedule: what is kept, what goes back, and who gets in."""

from __future__ import annotations

import pytest
from tests.doubles.stamps import fake_manifest
from tests.harness.schedule import ScheduledWorker, request

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.resume import Reason, resume_set
from ferryman.cache.slots import TREE, Holder, Role
from ferryman.cache.window_budget import WindowUse, most_window_pages, window_demand
from ferryman.errors import InvalidRequest
from ferryman.schedule.batch import PrefillStep
from ferryman.schedule.events import Drawn, SequenceAdmitted, SequenceHeld
from ferryman.schedule.sequence import Goal
from ferryman.schedule.windows import slide

PAGE = 4
FULL, WINDOW, RECURRENT = Kind.FULL, Kind.WINDOW, Kind.RECURRENT
MODELS = {
    "window": (WINDOW,),
    "full and window": (FULL, WINDOW),
    "window and recurrent": (WINDOW, RECURRENT),
    "all kinds": (FULL, WINDOW, RECURRENT),
}


def manifest_of(name: str, window_len: int = 6) -> StateManifest:
    return fake_manifest(PAGE, kinds=MODELS[name], window_len=window_len)


def worker_for(
    manifest: StateManifest,
    windows: int = 40,
    *,
    overlap: bool = True,
    chunk_tokens: int = 8,
    grid: int = 0,
) -> ScheduledWorker:
    sizes = {FULL: 60, WINDOW: windows, RECURRENT: 40}
    return ScheduledWorker(
        manifest,
        sizes,
        overlap=overlap,
        chunk_tokens=chunk_tokens,
        snapshot_grid=grid,
    )


def answer(worker: ScheduledWorker, name: str, prompt: list[int], max_tokens: int) -> list[int]:
    worker.submit(request(worker.manifest, name, prompt, max_tokens))
    worker.drain()
    assert worker.tokens[name] == worker.expected(name)
    return [*prompt, *worker.tokens[name]]


def compute(worker: ScheduledWorker) -> None:
    """Until the first token of a prompt was drawn."""
    while not [event for event in worker.events if isinstance(event, Drawn | SequenceHeld)]:
        worker.plan()
        worker.run_oldest()
    while worker.run_oldest():
        pass


def resumed_at(worker: ScheduledWorker, name: str) -> int:
    (plan,) = [event.plan for event in worker.seen(SequenceAdmitted) if event.request_id == name]
    return plan.position


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one step"])
@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("window_len", [1, 4, 6, 9])
def test_the_next_turn_resumes_at_the_last_page_end_of_the_answer(
    name: str, window_len: int, overlap: bool
) -> None:
    """However many tokens were decoded behind that page end: its window was not given away.

    A window of one token leaves nothing at a page's end: then there is no page to find it by.
    """
    for max_tokens in range(6, 15):
        worker = worker_for(manifest_of(name, window_len), overlap=overlap)
        history = answer(worker, "first", [1] * 6, max_tokens)
        computed = len(history) - 1
        answer(worker, "turn", [*history, 3, 3, 3, 3, 3], 2)
        nothing_kept = (name, window_len) == ("window", 1)
        assert resumed_at(worker, "turn") == (0 if nothing_kept else computed // PAGE * PAGE)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_window_that_slides_amid_a_page_keeps_what_the_last_page_end_needs(name: str) -> None:
    """As it does when a step advances by several tokens at once."""
    for max_tokens in range(6, 15):
        worker = worker_for(manifest_of(name), overlap=False)
        worker.submit(request(worker.manifest, "first", [1] * 6, max_tokens))
        while worker.plan() or worker.queued:
            worker.run_oldest()
            for sequence in worker.scheduler.sequences.decoding:
                slide(worker.scheduler.allocator, sequence, sequence.scheduled)
        history = [*[1] * 6, *worker.tokens["first"]]
        answer(worker, "turn", [*history, 3, 3, 3, 3, 3], 2)
        assert resumed_at(worker, "turn") == (len(history) - 1) // PAGE * PAGE


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_stem_that_two_prompts_share_resumes_the_third(name: str) -> None:
    """The second leaves the known path: it keeps the window there, and only there."""
    worker = worker_for(manifest_of(name))
    stem = [1] * 16
    answer(worker, "first", [*stem, *[2] * 17], 1)
    answer(worker, "second", [*stem, *[3] * 17], 1)
    answer(worker, "third", [*stem, *[4] * 17], 1)
    reached = [resumed_at(worker, each) for each in ("first", "second", "third")]
    junction = 16 if FULL in worker.manifest.kinds else resumed_at(worker, "third")
    assert reached == [0, 0, junction]
    tree, keys = worker.scheduler.allocator.tree, worker.requests["second"].keys
    held = {page for page, key in enumerate(keys) if tree.has(WINDOW, key)}
    wanted = [resume_set(worker.manifest, point).window for point in (junction, 32)]
    assert held == {page for span in wanted for page in range(*span)}


@pytest.mark.parametrize("name", ["window and recurrent", "all kinds"])
@pytest.mark.parametrize("chunk_tokens", [4, 8, 13, 32])
def test_every_snapshot_lies_in_the_tree_with_its_whole_window(
    name: str, chunk_tokens: int
) -> None:
    """Also where the next chunk was planned, and slid on, before the snapshot's step was done."""
    manifest = manifest_of(name, window_len=9)
    worker = worker_for(manifest, chunk_tokens=chunk_tokens, grid=PAGE)
    answer(worker, "r", [1] * 30, 8)
    tree, keys = worker.scheduler.allocator.tree, worker.requests["r"].keys
    points = [page + 1 for page, key in enumerate(keys) if tree.has(RECURRENT, key)]
    assert points == [1, 2, 3, 4, 5, 6, 7]
    for point in points:
        window = resume_set(manifest, point * PAGE).window
        assert all(tree.has(WINDOW, keys[page]) for page in range(*window))


def test_a_hole_in_the_window_ends_the_run_behind_every_point_that_sees_it() -> None:
    manifest = manifest_of("full and window")
    worker = worker_for(manifest)
    answer(worker, "first", [1] * 24, 1)
    allocator, keys = worker.scheduler.allocator, worker.requests["first"].keys
    tree = allocator.tree
    held = [page for page, key in enumerate(keys) if tree.has(WINDOW, key)]
    assert held == [3, 4, 5]
    allocator.pools.release(tree.drop(WINDOW, keys[4]), TREE)
    answer(worker, "again", [1] * 24 + [2], 1)
    (plan,) = [e.plan for e in worker.seen(SequenceAdmitted) if e.request_id == "again"]
    assert plan.position == 0
    assert plan.uncached[0].reason is Reason.WINDOW_EVICTED


@pytest.mark.parametrize("goal", list(Goal))
def test_slots_that_only_chunks_need_go_back_when_the_prompt_is_computed(goal: Goal) -> None:
    manifest = manifest_of("full and window")
    worker = worker_for(manifest, chunk_tokens=32)
    worker.submit(request(manifest, "r", [1] * 50, 12), goal)
    compute(worker)
    decoded = 11 if goal is Goal.DECODE else 0
    needs = window_demand(manifest, WindowUse(0, 50, 50 + decoded, (48,), (), 0), 32)
    leased = worker.scheduler.ledgers()[WINDOW].leased
    assert leased == needs.after_prompt < needs.most


@pytest.mark.parametrize("chunk_tokens", [4, 8, 13])
def test_a_pool_of_the_least_size_answers_any_prompt_without_cutting_it_finer(
    chunk_tokens: int,
) -> None:
    manifests = [manifest_of(name, length) for name in sorted(MODELS) for length in (1, 4, 6, 9)]
    for manifest in manifests:
        least = most_window_pages(manifest, chunk_tokens).most
        for prompt_len in (1, 3, 4, 9, 16, 23):
            worker = worker_for(manifest, least, chunk_tokens=chunk_tokens)
            answer(worker, "r", [1] * prompt_len, 9)
            (admitted,) = worker.seen(SequenceAdmitted)
            assert admitted.plan.chunk_len == chunk_tokens


def test_chunks_shrink_only_in_a_pool_that_could_never_hold_them() -> None:
    """Eight window pages hold a chunk of 24; with each page less chunks are a page shorter."""
    manifest, longest = manifest_of("full and window", window_len=9), {}
    for windows in range(3, 11):
        worker = worker_for(manifest, windows, chunk_tokens=24)
        worker.submit(request(manifest, "r", [1] * 50, 9))
        chunks = []
        while worker.plan() or worker.queued:
            steps = [step for step in worker.queued if isinstance(step, PrefillStep)]
            chunks += [chunk.end - chunk.start for step in steps for chunk in step.chunks]
            worker.run_oldest()
        assert worker.tokens["r"] == worker.expected("r")
        longest[windows] = max(chunks)
    assert longest == {3: 4, 4: 8, 5: 12, 6: 16, 7: 20, 8: 24, 9: 24, 10: 24}


def test_a_prompt_that_is_merely_short_of_room_waits_for_whole_chunks() -> None:
    manifest = manifest_of("full and window", window_len=9)
    worker = worker_for(manifest, 11, chunk_tokens=16)
    worker.submit(request(manifest, "here", [1] * 30, 9))
    worker.plan()
    worker.submit(request(manifest, "next", [2] * 30, 9))
    worker.plan()
    assert worker.scheduler.statistics().waiting == 1
    worker.drain()
    assert {event.plan.chunk_len for event in worker.seen(SequenceAdmitted)} == {16}
    assert worker.tokens["next"] == worker.expected("next")


@pytest.mark.parametrize("goal", list(Goal))
def test_what_no_pool_here_can_hold_is_refused_at_the_door(goal: Goal) -> None:
    manifest = manifest_of("full and window", window_len=9)
    worker = worker_for(manifest, 2)
    worker.submit(request(manifest, "short", [1] * 5, 3), goal)
    with pytest.raises(InvalidRequest, match="needs 3 window slots at once, there are 2"):
        worker.submit(request(manifest, "long", [1] * 9, 3), goal)
    with pytest.raises(InvalidRequest, match="there are 2"):
        worker.scheduler.check(request(manifest, "l", [1] * 9, 3))
    worker.drain()
    assert worker.scheduler.statistics().waiting == 0


@pytest.mark.parametrize("name", ["full and window", "all kinds"])
def test_an_idle_worker_reserves_whatever_of_the_prompt_it_holds(name: str) -> None:
    """Two slots are what the request holds at once; that one of its pages is cached is no third."""
    for prompt_len in range(5, 13):
        worker = worker_for(manifest_of(name, window_len=4), 2)
        asked = request(worker.manifest, "r", [1] * prompt_len, 4)
        worker.submit(request(worker.manifest, "before", [1] * 9, 1))
        worker.drain()
        held = worker.scheduler.ledgers()[WINDOW].by_role
        assert held == {"tree": 1}, "a page of the prompt was meant to be cached"
        sequence = worker.scheduler.reservations.reserve("res", asked, worker.now)
        assert len(sequence.slots()) > 0


@pytest.mark.parametrize("name", sorted(MODELS))
def test_decoding_never_asks_the_window_pool_for_a_slot(name: str) -> None:
    """All others are taken away as soon as the prompt is computed, and it decodes to its end."""
    manifest = manifest_of(name, window_len=9)
    worker = worker_for(manifest, 12)
    worker.submit(request(manifest, "r", [1] * 9, 30))
    compute(worker)
    pools = worker.scheduler.allocator.pools
    taken = pools.try_allocate({WINDOW: pools[WINDOW].num_free}, Holder(Role.STORE, "all"))
    assert taken is not None
    worker.drain()
    assert worker.tokens["r"] == worker.expected("r")
