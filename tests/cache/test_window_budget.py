"""The window budget against a naive model: sets of pages, every chunk and every decode step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
from tests.cache.manifests import small_manifest

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.resume import resume_set
from ferryman.cache.window_budget import (
    WindowDemand,
    WindowUse,
    chunk_end,
    fitting_chunk,
    most_window_pages,
    window_demand,
)


def manifest_of(window_len: int, page_size: int, grid: int) -> StateManifest:
    manifest = small_manifest(Kind.WINDOW, page_size=page_size, window_len=window_len)
    return replace(manifest, scan_chunk=grid)


def window_pages(manifest: StateManifest, position: int) -> set[int]:
    """All pages that a query at `position`, or a request that resumes there, reads."""
    return set(range(*resume_set(manifest, position).window))


def held_in_chunks(manifest: StateManifest, use: WindowUse, chunk_len: int) -> Iterator[set[int]]:
    """The pages held by each chunk, for every possible division."""
    for start in range(use.start, use.prompt_len, manifest.scan_chunk):
        end = chunk_end(start, chunk_len, use.prompt_len, manifest.scan_chunk)
        chunk = set(range(start // manifest.page_size, -(-end // manifest.page_size)))
        yield chunk | window_pages(manifest, start) | in_tree(manifest, use, end)


def held_while_decoding(manifest: StateManifest, use: WindowUse) -> Iterator[set[int]]:
    """A page end counts as soon as no step in flight can undo it; from then on it is kept."""
    tree = in_tree(manifest, use, use.prompt_len)
    yield window_pages(manifest, use.prompt_len) | tree
    for position in range(use.prompt_len, use.final_len):
        point = (position - use.uncertain_len) // manifest.page_size * manifest.page_size
        is_kept = use.uncertain_len >= 0 and point > use.prompt_len
        oldest = resume_set(manifest, point if is_kept else position).window.first
        first = min(oldest, position // manifest.page_size)
        reached = min(position + use.num_drafts, use.final_len - 1)
        yield set(range(first, reached // manifest.page_size + 1)) | tree


def in_tree(manifest: StateManifest, use: WindowUse, end: int) -> set[int]:
    """The pages given to the tree before the step that ends at `end` is done, or by it."""
    points = [point for point in use.points if point <= end]
    return {page for point in points for page in window_pages(manifest, point)}


def naive_demand(manifest: StateManifest, use: WindowUse, chunk_len: int) -> WindowDemand:
    reused = set(use.reused)
    decoding = max(len(pages - reused) for pages in held_while_decoding(manifest, use))
    chunks = [len(pages - reused) for pages in held_in_chunks(manifest, use, chunk_len)]
    return WindowDemand(max([decoding, *chunks]), decoding)


def random_use(rng: Random, manifest: StateManifest) -> WindowUse:
    page = manifest.page_size
    start = rng.choice([0, rng.randint(0, 5) * page])
    prompt_len = start + rng.randint(1, 8 * page)
    if start and rng.random() < 0.2:
        start = prompt_len  # decode's half of a hand-off
    ends = range(-(-(start + 1) // page), prompt_len // page + 1)
    points = sorted({rng.choice(ends) * page for _ in range(rng.randint(0, 3))} if ends else ())
    behind = [page for page in window_pages(manifest, start) if page < start // manifest.page_size]
    reused = [page for page in sorted(behind) if rng.random() < 0.5]
    final = prompt_len + rng.choice([0, rng.randint(0, 3 * page)])
    in_flight, drafts = rng.randint(-1, 3), rng.choice([0, 0, 1, 2, 5, 11])
    return WindowUse(start, prompt_len, final, tuple(points), tuple(reused), in_flight, drafts)


@pytest.mark.parametrize("window_len", [1, 2, 3, 4, 5, 8, 9, 15])
@pytest.mark.parametrize(("page_size", "grid"), [(1, 1), (4, 4), (4, 2), (4, 1), (8, 2)])
def test_the_budget_is_what_some_way_of_cutting_needs_and_no_way_needs_more(
    window_len: int, page_size: int, grid: int
) -> None:
    manifest, rng = manifest_of(window_len, page_size, grid), Random(window_len * 100 + page_size)
    for _ in range(150):
        use, chunk_len = random_use(rng, manifest), rng.randint(grid, 4 * page_size + grid)
        found = window_demand(manifest, use, chunk_len)
        assert found == naive_demand(manifest, use, chunk_len), (use, chunk_len)


@pytest.mark.parametrize("window_len", [1, 4, 6, 13])
def test_a_chunk_shrinks_only_where_it_could_never_fit(window_len: int) -> None:
    manifest, rng = manifest_of(window_len, 4, 2), Random(window_len)
    num_shrunk = 0
    for _ in range(300):
        use, num_slots = random_use(rng, manifest), rng.randint(1, 9)
        fitting = fitting_chunk(manifest, use, 18, num_slots)
        longer = [length for length in range(2, 19, 2) if length > fitting]
        assert all(window_demand(manifest, use, length).most > num_slots for length in longer)
        if fitting > 2:
            assert window_demand(manifest, use, fitting).most <= num_slots
        num_shrunk += 2 < fitting < 18
    assert num_shrunk, "some chunk was meant to be cut shorter and fit"


@pytest.mark.parametrize("num_drafts", [0, 3, 9])
@pytest.mark.parametrize("uncertain_len", [-1, 0, 1])
@pytest.mark.parametrize("window_len", [1, 4, 7, 12])
def test_a_pool_is_sized_for_the_longest_request_wherever_it_ends(
    uncertain_len: int, window_len: int, num_drafts: int
) -> None:
    manifest, rng = manifest_of(window_len, 4, 2), Random(window_len)
    most = most_window_pages(manifest, 10, uncertain_len=uncertain_len, num_drafts=num_drafts)
    needs = []
    for prompt_len in range(100, 140):
        final = prompt_len + rng.randint(0, 40)
        points = ((prompt_len - 1) // 4 * 4,) if uncertain_len >= 0 else ()
        use = WindowUse(0, prompt_len, final, points, (), uncertain_len, num_drafts)
        needs.append(window_demand(manifest, use, 10))
    assert max(need.most for need in needs) == most.most
    assert max(need.after_prompt for need in needs) == most.after_prompt


def test_the_budget_does_not_grow_with_the_prompt() -> None:
    manifest = manifest_of(128, 64, 64)
    short, long = (WindowUse(0, n, n + 500, (n // 64 * 64,)) for n in (3_000, 120_000))
    assert window_demand(manifest, short, 512) == window_demand(manifest, long, 512)
