"""The window budget: the window pages that a request holds at once. Plans, sizing and admission use
it.

A query at t reads the pages that meet [t-W+1, t]. A chunk [s, e) writes its keys before any of its
queries reads. So while it runs, its pages and the window before s are held together:

    pages of the tree | kept at points |        window of s, chunk        |
    ------------------+----------------+----------------------------------+
                      q-W+1 … q        s-W+1 … s ………………………………………………… e

A page that leaves the window gives its slot to a new page, unless it lies in the window of a resume
point: then it goes to the tree with the point, and the request loses its slot. In tokens and
without points the budget is `max(min(chunk, extend) + window, min(extend + max_new, window +
page))`, rounded up to pages for the worst position of the chunk. Loaded window pages count like
computed ones. The budget does not grow with the length of a prompt.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from ferryman.cache.manifest import ResumeShape, StateManifest


class WindowUse(NamedTuple):
    """The use that one request makes of its window.

    It resumes at `start`, computes up to `prompt_len` and decodes up to `final_len`. At the
    positions `points` it gives its window to the tree; `reused` are pages that come from the tree,
    rising. Up to `uncertain_len` positions of steps in flight may be discarded later (-1: nothing
    that is decoded will be kept). A step of decoding takes up to `num_drafts` tokens beyond its
    first.
    """

    start: int
    prompt_len: int
    final_len: int
    points: tuple[int, ...] = ()
    reused: tuple[int, ...] = ()
    uncertain_len: int = -1
    num_drafts: int = 0


class WindowDemand(NamedTuple):
    """Fresh window slots: the most at once, and the most once the prompt is computed."""

    most: int
    after_prompt: int


NO_WINDOWS = WindowDemand(0, 0)


class WindowPool(NamedTuple):
    """The pool as plans see it: its slots, and the `uncertain_len` of all requests in it."""

    num_slots: int = 2**31 - 1
    uncertain_len: int = -1


def first_page(shape: StateManifest | ResumeShape, position: int) -> int:
    """The oldest page that a query at `position` reads."""
    return max(0, position - shape.window_len + 1) // shape.page_size


def window_demand(manifest: StateManifest, use: WindowUse, chunk_len: int) -> WindowDemand:
    """The slots that `use` needs, for any division into chunks of at most `chunk_len` tokens.

    The bound is exact: some division needs this many.
    """
    held = _Held(manifest, use)
    decoding = held.while_decoding()
    chunks = [held.in_chunk(start, chunk_len) for start in _worst_starts(manifest, use, chunk_len)]
    return WindowDemand(max([decoding, *chunks]), decoding)


def fitting_chunk(manifest: StateManifest, use: WindowUse, chunk_len: int, num_slots: int) -> int:
    """The longest chunk, at most `chunk_len`, with which a pool of `num_slots` can hold `use`.

    If no chunk fits, the shortest possible one: one step of the scan's grid.
    """
    if window_demand(manifest, use, chunk_len).most <= num_slots:
        return chunk_len
    low, high = 1, -(-chunk_len // manifest.scan_chunk)  # in steps of the grid; `high` is too long
    while high - low > 1:
        middle = (low + high) // 2
        fits = window_demand(manifest, use, middle * manifest.scan_chunk).most <= num_slots
        low, high = (middle, high) if fits else (low, middle)
    return low * manifest.scan_chunk


def most_window_pages(
    manifest: StateManifest, chunk_len: int, *, uncertain_len: int = -1, num_drafts: int = 0
) -> WindowDemand:
    """The slots that the longest request needs, for any length: with these every request can run.

    A worker that keeps what it decodes also keeps the window of the prompt's end.
    """
    page = manifest.page_size
    far = -(-4 * (manifest.window_len + chunk_len + num_drafts + page) // page) * page
    demands = []
    for end in range(far + 1, far + page + 1):
        points = ((end - 1) // page * page,) if uncertain_len >= 0 else ()
        use = WindowUse(0, end, end + far, points, (), uncertain_len, num_drafts)
        demands.append(window_demand(manifest, use, chunk_len))
    return WindowDemand(max(d.most for d in demands), max(d.after_prompt for d in demands))


class _Held:
    """Counts the slots that a request owns, or owned until it gave them to the tree."""

    def __init__(self, manifest: StateManifest, use: WindowUse) -> None:
        self._manifest = manifest
        self._use = use
        self._given = _merged(
            [(first_page(manifest, point), point // manifest.page_size) for point in use.points]
        )
        self._given_again = [
            page for page in use.reused if any(first <= page < end for first, end in self._given)
        ]

    def in_chunk(self, start: int, chunk_len: int) -> int:
        """The slots held while the longest chunk from `start` runs."""
        end = chunk_end(start, chunk_len, self._use.prompt_len, self._manifest.scan_chunk)
        return self._between(start, end)

    def while_decoding(self) -> int:
        """The slots held after the prompt's end. The count is highest when a step reaches the start
        of the last page, or when the first page end that decoding keeps becomes certain."""
        use, page_size = self._use, self._manifest.page_size
        at_end = self._between(use.prompt_len, use.prompt_len)
        if use.final_len <= use.prompt_len:
            return at_end
        last = use.final_len - 1
        reaches = max(use.prompt_len, last // page_size * page_size - use.num_drafts)
        first_kept = (use.prompt_len // page_size + 1) * page_size
        certain = min(max(reaches, first_kept + use.uncertain_len), last)
        return max(at_end, self._in_step(reaches), self._in_step(certain))

    def _in_step(self, position: int) -> int:
        """The slots held while a step decodes from `position`: for its own window, or for the
        window of the page end that is still to be kept."""
        use, page_size = self._use, self._manifest.page_size
        kept = (position - use.uncertain_len) // page_size * page_size
        oldest = kept if use.uncertain_len >= 0 and kept > use.prompt_len else position
        reached = min(position + use.num_drafts, use.final_len - 1)
        return self._between(oldest, reached + 1)

    def _between(self, start: int, end: int) -> int:
        """The pages from the window of `start` to `end`, and those given away before them."""
        first, last = first_page(self._manifest, start), -(-end // self._manifest.page_size)
        pages = max(0, last - first) + sum(
            min(stop, first) - begin for begin, stop in self._given if begin < first
        )
        return pages - self._num_reused(first, last)

    def _num_reused(self, first: int, last: int) -> int:
        """The counted pages that the tree owned before."""
        reused = self._use.reused
        if not reused or (first > reused[-1] and not self._given_again):
            return 0
        inside = bisect_left(reused, last) - bisect_left(reused, first)
        return inside + bisect_left(self._given_again, first)


def chunk_end(start: int, chunk_len: int, prompt_len: int, grid: int) -> int:
    """The end of a chunk: the prompt's end, or the last grid point within `chunk_len` tokens."""
    if start + chunk_len >= prompt_len:
        return prompt_len
    return max(start, (start + chunk_len) // grid * grid)


def _worst_starts(manifest: StateManifest, use: WindowUse, chunk_len: int) -> list[int]:
    """Starts of chunks, among them one with the highest count.

    The count rises when the end of the chunk enters a page, and falls when its window leaves one,
    once for each page. So only the last rise matters, and the chunks around the prompt's end.
    """
    grid, page = manifest.scan_chunk, manifest.page_size
    if use.start >= use.prompt_len:
        return []
    length = max(grid, chunk_len // grid * grid)
    last = max(0, use.prompt_len - length) // grid * grid
    rise = last - (last + length - grid) % page
    starts = {max(use.start, start) for start in (rise, last, last + grid)}
    return [start for start in starts if start < use.prompt_len]


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Disjoint, rising spans of the same pages; `spans` must rise too."""
    merged: list[tuple[int, int]] = []
    for first, end in spans:
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif first < end:
            merged.append((first, end))
    return merged
