"""The resume set and the plan: what must be in device memory to resume a sequence at position p.

    resume_set(p) = full:      pages 0 .. ceil(p/P)-1
                    window:    pages floor(max(0, p-W+1)/P) .. ceil(p/P)-1
                    recurrent: {snapshot at p}            (empty when p = 0: a cleared slot)

Everything that is decided about cached state is a projection of this one answer: matching,
copy-on-write, load-back, admission budgets, the hand-off. Planning has no side effects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

from ferryman.cache.capacity import most_window_pages
from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.units import HostUnit

# Looking up a member of an enumeration takes 70 ns; a plan does it twenty times.
_FULL, _WINDOW, _RECURRENT = Kind.FULL, Kind.WINDOW, Kind.RECURRENT


class Reason(StrEnum):
    """Why a page of the prompt is computed although it might have been reused."""

    NEVER_SEEN = "never_seen"
    NO_SNAPSHOT = "no_snapshot"
    WINDOW_EVICTED = "window_evicted"
    PAGE_ALIGNMENT = "page_alignment"
    CHEAPER_TO_RECOMPUTE = "cheaper_to_recompute"
    CACHE_OFF = "cache_off"
    NO_ROOM = "no_room"
    HOST_FULL = "host_full"
    STORAGE_TIMEOUT = "storage_timeout"
    BELOW_THRESHOLD = "below_threshold"
    RATE_LIMITED = "rate_limited"
    TIER_FAILED = "tier_failed"


# Small values that every plan makes are named tuples: a frozen dataclass takes three times as long.


class Uncached(NamedTuple):
    """Pages [first_page, end_page) are computed anew, for one reason."""

    reason: Reason
    first_page: int
    end_page: int


class PageSpan(NamedTuple):
    """Absolute pages [first, end)."""

    first: int
    end: int

    @property
    def num_pages(self) -> int:
        return self.end - self.first


class ResumeSet(NamedTuple):
    """What position `position` needs: pages of each kind, and perhaps a recurrent state at it."""

    position: int
    full: PageSpan
    window: PageSpan
    needs_snapshot: bool


NO_PAGES = PageSpan(0, 0)


def resume_set(manifest: StateManifest, position: int) -> ResumeSet:
    """The answer everything else is read off from."""
    pages = -(-position // manifest.page_size)
    oldest = max(0, position - manifest.window_len + 1) // manifest.page_size
    has = manifest.kinds
    return ResumeSet(
        position,
        PageSpan(0, pages) if _FULL in has else NO_PAGES,
        PageSpan(oldest, pages) if _WINDOW in has else NO_PAGES,
        _RECURRENT in has and position > 0,
    )


# How the working recurrent slot of a request comes to its first state: exactly one of these.


@dataclass(frozen=True, slots=True)
class Clear:
    """Position 0: all zeros."""


@dataclass(frozen=True, slots=True)
class CopyFrom:
    """Copy-on-write from the device snapshot that the tree holds under `key`."""

    key: PageKey


@dataclass(frozen=True, slots=True)
class LoadFrom:
    """From a unit of the host tier."""

    unit: HostUnit


@dataclass(frozen=True, slots=True)
class Receive:
    """From a prefill worker, as part of a hand-off at position n."""


Initialiser = Clear | CopyFrom | LoadFrom | Receive


class DeviceView(Protocol):
    """What the plan asks of the device tier; the prefix tree answers."""

    def match_depth(self, keys: Sequence[PageKey]) -> int: ...

    def snapshot_depths(self, keys: Sequence[PageKey], depth: int) -> Iterator[int]: ...

    def has(self, kind: Kind, key: PageKey) -> bool: ...


class Shortfall(NamedTuple):
    """Pages before `end_page` that a slower tier holds were not brought to the host, and why."""

    end_page: int
    reason: Reason


NO_SHORTFALL = Shortfall(0, Reason.NEVER_SEEN)


@dataclass(frozen=True)
class HostView:
    """Units of one key chain that the host tier has leased to the reader, by (kind, page index).

    `shortfall` says what a slower tier holds beyond them: the plan names it as the reason.
    """

    units: Mapping[tuple[Kind, int], HostUnit] = field(default_factory=dict)
    shortfall: Shortfall = NO_SHORTFALL

    def pages_from(self, page: int) -> int:
        """The end of the run of full pages that starts at `page`."""
        while (_FULL, page) in self.units:
            page += 1
        return page


EMPTY_HOST = HostView()


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured costs: seconds to compute one prompt token, seconds to load one byte."""

    prefill_seconds_per_token: float
    load_seconds_per_byte: float


class ResumePlan(NamedTuple):
    """How a request of `prompt_len` tokens will resume at `position`.

    `anchor_pages` pages are read from the device tree; `window_pages` are the window pages reused
    there. `loads` come from the host. `snapshots` are the positions to freeze on the way.
    `demand` counts the fresh slots of each pool that the whole prompt needs, loads included.

    `seconds` is the sum of `load_seconds`, for `load_bytes`, and `compute_seconds`, for the tokens
    behind `position`. The loads replace computing of `recompute_seconds` (0 without loads).
    """

    position: int
    prompt_len: int
    anchor_pages: int
    window_pages: tuple[int, ...]
    loads: tuple[HostUnit, ...]
    initialiser: Initialiser
    snapshots: tuple[int, ...]
    uncached: tuple[Uncached, ...]
    demand: Mapping[Kind, int]
    seconds: float
    load_bytes: int = 0
    load_seconds: float = 0.0
    compute_seconds: float = 0.0
    recompute_seconds: float = 0.0


class _Candidate(NamedTuple):
    """A depth at which the whole resume set is resident, and what must be loaded for it."""

    depth: int
    loads: tuple[HostUnit, ...]
    window_pages: tuple[int, ...]
    load_bytes: int
    load_seconds: float
    compute_seconds: float

    @property
    def seconds(self) -> float:
        return self.load_seconds + self.compute_seconds


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans for one model on one worker; a step computes at most `step_tokens` of a prompt.

    Besides the end and the junction, every multiple of `snapshot_grid` tokens that is computed
    gets a snapshot (0: none).
    """

    manifest: StateManifest
    costs: Costs
    step_tokens: int
    snapshot_grid: int = 0

    def plan(
        self, keys: Sequence[PageKey], prompt_len: int, device: DeviceView, host: HostView
    ) -> ResumePlan:
        """The cheapest way to have position `prompt_len`, one token at least being computed."""
        page_size = self.manifest.page_size
        matched = device.match_depth(keys)
        seen = host.pages_from(matched)
        limit = min(seen, (prompt_len - 1) // page_size)
        best, unloaded, refused = self._choose(keys, prompt_len, matched, limit, device, host)
        junction = seen if best.depth < min(seen, limit) else best.depth
        snapshots = self._snapshots(best.depth, junction, prompt_len // page_size)
        return ResumePlan(
            position=best.depth * page_size,
            prompt_len=prompt_len,
            anchor_pages=min(best.depth, matched),
            window_pages=best.window_pages,
            loads=best.loads,
            initialiser=self._initialiser(keys, best),
            snapshots=snapshots,
            uncached=self._uncached(best.depth, limit, seen, prompt_len, refused),
            demand=self._demand(best, matched, prompt_len, len(snapshots)),
            seconds=best.load_seconds + best.compute_seconds,
            load_bytes=best.load_bytes,
            load_seconds=best.load_seconds,
            compute_seconds=best.compute_seconds,
            recompute_seconds=unloaded.compute_seconds - best.compute_seconds
            if best.loads
            else 0.0,
        )

    def plan_cold(self, prompt_len: int, reason: Reason) -> ResumePlan:
        """Computes everything: without a prefix cache, or when what was cached proved corrupt."""
        best = self._candidate_zero(prompt_len)
        pages = -(-prompt_len // self.manifest.page_size)
        return ResumePlan(
            position=0,
            prompt_len=prompt_len,
            anchor_pages=0,
            window_pages=(),
            loads=(),
            initialiser=Clear(),
            snapshots=(),
            uncached=(Uncached(reason, 0, pages),),
            demand=self._demand(best, 0, prompt_len, 0),
            seconds=best.seconds,
            compute_seconds=best.seconds,
        )

    def plan_receive(
        self, keys: Sequence[PageKey], prompt_len: int, device: DeviceView
    ) -> ResumePlan:
        """Decode's half of a hand-off at n: what is here stays, all the rest will be received."""
        page_size, needs = self.manifest.page_size, resume_set(self.manifest, prompt_len)
        full_pages = prompt_len // page_size
        matched = device.match_depth(keys[:full_pages])
        window_pages = tuple(
            page
            for page in range(needs.window.first, min(needs.window.end, matched))
            if device.has(_WINDOW, keys[page])
        )
        return ResumePlan(
            position=prompt_len,
            prompt_len=prompt_len,
            anchor_pages=matched,
            window_pages=window_pages,
            loads=(),
            initialiser=Receive(),
            snapshots=(),
            uncached=(),
            demand=self._per_kind(
                full=needs.full.num_pages - matched,
                window=needs.window.num_pages - len(window_pages),
                recurrent=1,
            ),
            seconds=0.0,
        )

    # Choosing the position.

    def _choose(
        self,
        keys: Sequence[PageKey],
        prompt_len: int,
        matched: int,
        limit: int,
        device: DeviceView,
        host: HostView,
    ) -> tuple[_Candidate, _Candidate, Reason]:
        """The cheapest candidate, the best without loads, and why no deeper one was taken.

        Once a candidate needs no load, every shallower one only adds prefill: the search ends.
        """
        best = unloaded = self._candidate_zero(prompt_len)
        refused = Reason.NO_SNAPSHOT
        for depth in self._depths(keys, matched, limit, device, host):
            candidate = self._candidate(keys, depth, prompt_len, matched, device, host)
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

    def _candidate_zero(self, prompt_len: int) -> _Candidate:
        return _Candidate(0, (), (), 0, 0.0, prompt_len * self.costs.prefill_seconds_per_token)

    def _depths(
        self,
        keys: Sequence[PageKey],
        matched: int,
        limit: int,
        device: DeviceView,
        host: HostView,
    ) -> Iterator[int]:
        """Depths to consider, deepest first."""
        if _RECURRENT not in self.manifest.kinds:
            return iter(range(limit, 0, -1))
        on_device = device.snapshot_depths(keys, min(matched, limit))
        if not host.units:
            return on_device
        on_host = sorted(
            (page + 1 for kind, page in host.units if kind is _RECURRENT and page < limit),
            reverse=True,
        )
        return _merge_descending(iter(on_host), on_device)

    def _candidate(
        self,
        keys: Sequence[PageKey],
        depth: int,
        prompt_len: int,
        matched: int,
        device: DeviceView,
        host: HostView,
    ) -> _Candidate | None:
        """The candidate at `depth`, or None when part of its resume set is nowhere."""
        needs = resume_set(self.manifest, depth * self.manifest.page_size)
        loads = [host.units[_FULL, page] for page in range(matched, needs.full.end)]
        window_pages = []
        for page in range(*needs.window):
            if page < matched and device.has(_WINDOW, keys[page]):
                window_pages.append(page)
            elif unit := host.units.get((_WINDOW, page)):
                loads.append(unit)
            else:
                return None
        if needs.needs_snapshot and not device.has(_RECURRENT, keys[depth - 1]):
            loads.append(host.units[_RECURRENT, depth - 1])
        compute = prompt_len - depth * self.manifest.page_size
        num_bytes = sum([unit.num_bytes for unit in loads]) if loads else 0
        return _Candidate(
            depth,
            tuple(loads),
            tuple(window_pages),
            num_bytes,
            num_bytes * self.costs.load_seconds_per_byte,
            compute * self.costs.prefill_seconds_per_token,
        )

    # Spelling out the choice.

    def _initialiser(self, keys: Sequence[PageKey], best: _Candidate) -> Initialiser:
        if best.depth == 0 or _RECURRENT not in self.manifest.kinds:
            return Clear()
        for unit in best.loads:
            if unit.kind is _RECURRENT:
                return LoadFrom(unit)
        return CopyFrom(keys[best.depth - 1])

    def _snapshots(self, depth: int, junction: int, end: int) -> tuple[int, ...]:
        """The prompt's last full page and the junction: where a known path is left."""
        if _RECURRENT not in self.manifest.kinds:
            return ()
        page_size = self.manifest.page_size
        if depth < junction < end:
            return (junction * page_size, end * page_size)
        return (end * page_size,) if depth < end else ()

    def _uncached(
        self, depth: int, limit: int, seen: int, prompt_len: int, refused: Reason
    ) -> tuple[Uncached, ...]:
        pages = -(-prompt_len // self.manifest.page_size)
        usable = max(depth, limit)
        all_seen = seen >= prompt_len // self.manifest.page_size
        aligned = pages if all_seen else max(usable, seen)
        spans = []
        if depth < usable:
            spans.append(Uncached(refused, depth, usable))
        if usable < aligned:
            spans.append(Uncached(Reason.PAGE_ALIGNMENT, usable, aligned))
        if aligned < pages:
            spans.append(Uncached(Reason.NEVER_SEEN, aligned, pages))
        return tuple(spans)

    def _demand(
        self, best: _Candidate, matched: int, prompt_len: int, num_snapshots: int
    ) -> Mapping[Kind, int]:
        """Fresh slots for the whole prompt: what is reused on the device is not among them."""
        pages = -(-prompt_len // self.manifest.page_size)
        window = 0
        if _WINDOW in self.manifest.kinds:
            window = min(
                pages - best.depth,
                most_window_pages(self.manifest, self.step_tokens, 1 + num_snapshots),
            )
            window += sum(unit.kind is _WINDOW for unit in best.loads)
        full = pages - min(best.depth, matched)
        return self._per_kind(full=full, window=window, recurrent=1 + num_snapshots)

    def _per_kind(self, *, full: int, window: int, recurrent: int) -> Mapping[Kind, int]:
        demand, kinds = {}, self.manifest.kinds
        if _FULL in kinds:
            demand[_FULL] = full
        if _WINDOW in kinds:
            demand[_WINDOW] = window
        if _RECURRENT in kinds:
            demand[_RECURRENT] = recurrent
        return demand


def _merge_descending(first: Iterator[int], second: Iterator[int]) -> Iterator[int]:
    """Both descending sequences as one, each value once. Lazy: a long tail is never walked."""
    left, right = next(first, 0), next(second, 0)
    while left or right:
        value = max(left, right)
        yield value
        if left == value:
            left = next(first, 0)
        if right == value:
            right = next(second, 0)
