"""The page ends, with costs, at which one prompt may resume: their whole resume set is cached.

With recurrent state these are the page ends that hold a snapshot. With a window, every page of the
window must be cached: a page that is missing rules out every page end whose window contains it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, ResumeShape, StateManifest
from ferryman.cache.resume import DeviceView, HostView, Reason, ResumeCosts, resume_set
from ferryman.cache.units import HostUnit

_FULL, _WINDOW, _RECURRENT = Kind.FULL, Kind.WINDOW, Kind.RECURRENT


def point_units(shape: StateManifest | ResumeShape, depth: int) -> Iterator[tuple[Kind, int]]:
    """The units that a resume at the end of `depth` pages needs besides full pages: window pages,
    ascending, then the snapshot. A unit is its kind and its page."""
    needs = resume_set(shape, depth * shape.page_size)
    yield from ((_WINDOW, page) for page in range(*needs.window))
    if needs.needs_snapshot:
        yield _RECURRENT, depth - 1


def resume_unit_names(shape: StateManifest | ResumeShape, depth: int) -> list[tuple[Kind, int]]:
    """All units that a resume at the end of `depth` pages needs: full pages, then `point_units`."""
    full = resume_set(shape, depth * shape.page_size).full
    return [*((_FULL, page) for page in range(*full)), *point_units(shape, depth)]


def is_resume_point(
    shape: StateManifest | ResumeShape, depth: int, has: Callable[[Kind, int], bool]
) -> bool:
    """Whether there are all `point_units`. The snapshot is the one that most often is missing, so
    it is asked for first."""
    needs = resume_set(shape, depth * shape.page_size)
    if needs.needs_snapshot and not has(_RECURRENT, depth - 1):
        return False
    return all(has(_WINDOW, page) for page in range(*needs.window))


def resume_depths(
    device: DeviceView, manifest: StateManifest, keys: Sequence[PageKey], limit: int
) -> Iterator[int]:
    """Depths whose whole resume set is cached, deepest first, without costs. The first `limit`
    pages of the chain are cached."""
    depths: Iterable[int] = range(limit, 0, -1)
    if _RECURRENT in manifest.kinds:
        depths = device.snapshot_depths(keys, limit)
    return (depth for depth in depths if _has_window(device, manifest, keys, depth))


def _has_window(
    device: DeviceView, manifest: StateManifest, keys: Sequence[PageKey], depth: int
) -> bool:
    window = resume_set(manifest, depth * manifest.page_size).window
    return all(device.has(_WINDOW, keys[page]) for page in range(*window))


class ResumeCandidate(NamedTuple):
    """A depth at which the whole resume set is resident, and what must be loaded for it."""

    depth: int
    loads: tuple[HostUnit, ...]
    window_pages: tuple[int, ...]
    load_bytes: int
    load_seconds: float
    compute_seconds: float
    seconds: float


class ResumeSearch(NamedTuple):
    """The candidates of one prompt. The device holds its first `matched` pages; `limit` is the
    deepest page end at which it might resume."""

    manifest: StateManifest
    costs: ResumeCosts
    keys: Sequence[PageKey]
    prompt_len: int
    device: DeviceView
    host: HostView
    matched: int
    limit: int

    def choose(self) -> tuple[ResumeCandidate, ResumeCandidate, Reason]:
        """The cheapest candidate, the best without loads, and why no deeper one was taken.

        The search ends at the first candidate without loads: every shallower one only adds prefill.
        """
        best = unloaded = self.from_the_start()
        refused = Reason.NO_SNAPSHOT if _RECURRENT in self.manifest.kinds else Reason.WINDOW_EVICTED
        for depth in self._depths():
            candidate = self._candidate(depth)
            if candidate is None:
                refused = Reason.WINDOW_EVICTED
                continue
            if candidate.seconds <= best.seconds:
                best = candidate
            elif best.depth == 0:
                refused = Reason.CHEAPER_TO_RECOMPUTE
            if not candidate.loads:
                unloaded = candidate
                break
        return best, unloaded, refused

    def from_the_start(self) -> ResumeCandidate:
        """The candidate that computes the whole prompt."""
        seconds = self.prompt_len * self.costs.prefill_seconds_per_token
        return ResumeCandidate(0, (), (), 0, 0.0, seconds, seconds)

    def _depths(self) -> Iterator[int]:
        """Depths to consider, deepest first."""
        if _RECURRENT not in self.manifest.kinds:
            return self._page_ends()
        on_device = self.device.snapshot_depths(self.keys, min(self.matched, self.limit))
        if not self.host.units:
            return on_device
        on_host = sorted(
            (p + 1 for kind, p in self.host.units if kind is _RECURRENT and p < self.limit),
            reverse=True,
        )
        return _merge_descending(iter(on_host), on_device)

    def _page_ends(self) -> Iterator[int]:
        """Page ends with an unbroken run of window pages before them, deepest first.

        More than a window beyond the `matched` pages, each further page adds the same load and
        saves the same prefill. The cost is linear there, so only the deepest of these page ends is
        yielded.
        """
        span = -(-self.manifest.window_len // self.manifest.page_size)
        depth = self.limit
        while depth > 0:
            lacking = self._lacking_page(depth)
            if lacking < 0:
                yield depth
                depth = min(depth - 1, self.matched + span)
            else:
                depth = lacking

    def _lacking_page(self, depth: int) -> int:
        """The last window page of a resume at `depth` that is not cached; -1 if none is missing."""
        needs = resume_set(self.manifest, depth * self.manifest.page_size)
        keys, units, has, matched = self.keys, self.host.units, self.device.has, self.matched
        for page in reversed(range(*needs.window)):
            here = page < matched and has(_WINDOW, keys[page])
            if not here and (_WINDOW, page) not in units:
                return page
        return -1

    def _candidate(self, depth: int) -> ResumeCandidate | None:
        """The candidate at `depth`, or None when part of its resume set is not cached."""
        units, keys, device = self.host.units, self.keys, self.device
        needs = resume_set(self.manifest, depth * self.manifest.page_size)
        loads = [units[_FULL, page] for page in range(self.matched, needs.full.end)]
        window_pages = []
        for page in range(*needs.window):
            if page < self.matched and device.has(_WINDOW, keys[page]):
                window_pages.append(page)
            elif unit := units.get((_WINDOW, page)):
                loads.append(unit)
            else:
                return None
        if needs.needs_snapshot and not device.has(_RECURRENT, keys[depth - 1]):
            loads.append(units[_RECURRENT, depth - 1])
        return self._priced(depth, tuple(loads), tuple(window_pages))

    def _priced(
        self, depth: int, loads: tuple[HostUnit, ...], window_pages: tuple[int, ...]
    ) -> ResumeCandidate:
        compute = self.prompt_len - depth * self.manifest.page_size
        compute_seconds = compute * self.costs.prefill_seconds_per_token
        num_bytes = sum([unit.num_bytes for unit in loads]) if loads else 0
        load_seconds = num_bytes * self.costs.load_seconds_per_byte
        seconds = load_seconds + compute_seconds
        return ResumeCandidate(
            depth, loads, window_pages, num_bytes, load_seconds, compute_seconds, seconds
        )


def _merge_descending(first: Iterator[int], second: Iterator[int]) -> Iterator[int]:
    """Merges two descending sequences, each value once. Lazy: long tails are not walked."""
    left, right = next(first, 0), next(second, 0)
    while left or right:
        value = max(left, right)
        yield value
        if left == value:
            left = next(first, 0)
        if right == value:
            right = next(second, 0)
