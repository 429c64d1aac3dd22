"""The resume set and the plan: what must be in device memory to resume a sequence at position p.

    resume_set(p) = full:      pages 0 .. ceil(p/P)-1
                    window:    pages floor(max(0, p-W+1)/P) .. ceil(p/P)-1
                    recurrent: {snapshot at p}            (empty when p = 0: a cleared slot)

Every decision about cached state is a projection of this one answer: matching, copy-on-write,
load-back, admission budgets, the hand-off. Planning has no side effects.

A prefix match, as other systems have it, answers this for attention alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil, floor
from typing import NamedTuple, Protocol

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, ResumeShape, StateManifest
from ferryman.cache.units import HostUnit
from ferryman.cache.window_budget import NO_WINDOWS, WindowDemand, first_page

# Looking up a member of an enumeration takes 70 ns; a plan does it twenty times.
_FULL, _WINDOW, _RECURRENT = Kind.FULL, Kind.WINDOW, Kind.RECURRENT


class Reason(StrEnum):
    """The reason why a page of the prompt is computed although it might have been reused."""

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
    PROMPT_LOGPROBS = "prompt_logprobs"
    OTHER_ARITHMETIC = "other_arithmetic"
    QUARANTINED = "quarantined"


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
    """The state that `position` needs: pages of each kind, and perhaps a recurrent state."""

    position: int
    full: PageSpan
    window: PageSpan
    needs_snapshot: bool


NO_PAGES = PageSpan(0, 0)


def max_resume_pages(prompt_len: int, page_size: int) -> int:
    """The pages that a prompt can resume from at most: its last token is always computed."""
    return max(0, prompt_len - 1) // page_size


def resume_set(shape: StateManifest | ResumeShape, position: int) -> ResumeSet:
    """The resume set of `position`; all other code derives its answer from this one."""
    pages = -(-position // shape.page_size)
    oldest = first_page(shape, position)
    has = shape.kinds
    return ResumeSet(
        position,
        PageSpan(0, pages) if _FULL in has else NO_PAGES,
        PageSpan(oldest, pages) if _WINDOW in has else NO_PAGES,
        _RECURRENT in has and position > 0,
    )


# The origin of a request's first recurrent state, in its working slot: exactly one of these.


@dataclass(frozen=True, slots=True)
class ClearState:
    """Position 0: all zeros."""


@dataclass(frozen=True, slots=True)
class CopyState:
    """Copy-on-write from the device snapshot that the tree holds under `key`."""

    key: PageKey


@dataclass(frozen=True, slots=True)
class LoadState:
    """The state is loaded from a unit of the host tier."""

    unit: HostUnit


@dataclass(frozen=True, slots=True)
class ReceiveState:
    """The state comes from a prefill worker, in a hand-off at position n."""


Initialiser = ClearState | CopyState | LoadState | ReceiveState


class DeviceView(Protocol):
    """The questions of the planner to the device tier; the prefix tree implements them."""

    def match_depth(self, keys: Sequence[PageKey]) -> int: ...

    def snapshot_depths(self, keys: Sequence[PageKey], depth: int) -> Iterator[int]: ...

    def has(self, kind: Kind, key: PageKey) -> bool: ...


class EmptyDevice:
    """A device tier without anything, for a request that may reuse nothing."""

    def match_depth(self, keys: Sequence[PageKey]) -> int:
        return 0

    def snapshot_depths(self, keys: Sequence[PageKey], depth: int) -> Iterator[int]:
        return iter(())

    def has(self, kind: Kind, key: PageKey) -> bool:
        return False


EMPTY_DEVICE: DeviceView = EmptyDevice()


class Shortfall(NamedTuple):
    """Pages before `end_page` that a slower tier holds were not brought to the host, and why."""

    end_page: int
    reason: Reason


NO_SHORTFALL = Shortfall(0, Reason.NEVER_SEEN)


@dataclass(frozen=True)
class HostView:
    """Units of one key chain that the host tier has leased to the reader, by (kind, page index).

    `shortfall` names the units of a slower tier beyond them; the plan reports its reason. So it
    does for the first `unlike_pages` pages, which others have computed in another arithmetic: they
    have other keys, and are never among the units.
    """

    units: Mapping[tuple[Kind, int], HostUnit] = field(default_factory=dict)
    shortfall: Shortfall = NO_SHORTFALL
    unlike_pages: int = 0

    def pages_from(self, page: int) -> int:
        """The end of the run of full pages that starts at `page`."""
        while (_FULL, page) in self.units:
            page += 1
        return page

    def end_from(self, page: int) -> int:
        """The end of all units, at least `page`: for models without full pages."""
        return max([page, *(held + 1 for _, held in self.units)])


EMPTY_HOST = HostView()


@dataclass(frozen=True, slots=True)
class ResumeCosts:
    """Measured costs: seconds to compute one prompt token, seconds to load one byte."""

    prefill_seconds_per_token: float
    load_seconds_per_byte: float


# Costs until the first steps are measured: a small model on one core, and a plain memcpy.
FIRST_GUESS = ResumeCosts(prefill_seconds_per_token=1e-3, load_seconds_per_byte=1 / 5e9)


class ResumePlan(NamedTuple):
    """The way in which a request of `prompt_len` tokens will resume at `position`.

    `anchor_pages` pages are read from the device tree; `window_pages` are the window pages reused
    there. `loads` come from the host. `snapshots` are the positions at which later prompts can
    resume: the request saves its recurrent state there on the way, and keeps the window before
    them. `demand` counts the fresh slots of each pool for the whole prompt, loads included; its
    window pages include those of decoding up to `final_len` (`windows`). A chunk has at most
    `chunk_len` tokens.

    `seconds` is the sum of `load_seconds`, for `load_bytes`, and `compute_seconds`, for the tokens
    after `position`. The loads save `recompute_seconds` of computing (0 without loads).
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
    final_len: int
    chunk_len: int
    windows: WindowDemand = NO_WINDOWS
    load_bytes: int = 0
    load_seconds: float = 0.0
    compute_seconds: float = 0.0
    recompute_seconds: float = 0.0


# The reasons that a slower tier could have removed.
_LACKING = (Reason.NEVER_SEEN, Reason.NO_SNAPSHOT, Reason.WINDOW_EVICTED)


def uncached_spans(
    depth: int,
    limit: int,
    seen: int,
    prompt_pages: float,
    refused: Reason,
    host: HostView,
) -> tuple[Uncached, ...]:
    """The reasons for all pages from `depth` on, for a prompt of `prompt_pages` that resumes there.

    `limit` is the deepest page end at which it might resume, `seen` the end of the cached pages.
    `refused` says why it does not resume deeper, `host` what slower tiers did not bring, and what
    was seen in another arithmetic alone.
    """
    pages = ceil(prompt_pages)
    usable = max(depth, limit)
    aligned = pages if seen >= floor(prompt_pages) else max(usable, seen)
    spans = []
    if depth < usable:
        spans.append(Uncached(refused, depth, usable))
    if usable < aligned:
        spans.append(Uncached(Reason.PAGE_ALIGNMENT, usable, aligned))
    if aligned < pages:
        spans.append(Uncached(Reason.NEVER_SEEN, aligned, pages))
    unlike = Shortfall(host.unlike_pages, Reason.OTHER_ARITHMETIC)
    for shortfall, removable in ((host.shortfall, _LACKING), (unlike, (Reason.NEVER_SEEN,))):
        if shortfall.end_page > depth:
            spans = [part for span in spans for part in _split(span, shortfall, removable)]
    return tuple(spans)


def _split(span: Uncached, shortfall: Shortfall, removable: tuple[Reason, ...]) -> list[Uncached]:
    """Splits a span whose reason is `removable`: the pages of the shortfall get its reason."""
    reason, first, end = span
    if reason not in removable or shortfall.end_page <= first:
        return [span]
    cut = min(end, shortfall.end_page)
    brought = Uncached(shortfall.reason, first, cut)
    return [brought, Uncached(reason, cut, end)] if cut < end else [brought]
