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

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.units import HostUnit
from ferryman.cache.window_budget import NO_WINDOWS, WindowDemand, first_page

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
    oldest = first_page(manifest, position)
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

    def end_from(self, page: int) -> int:
        """The end of all units, at least `page`: for models without full pages."""
        return max([page, *(held + 1 for _, held in self.units)])


EMPTY_HOST = HostView()


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured costs: seconds to compute one prompt token, seconds to load one byte."""

    prefill_seconds_per_token: float
    load_seconds_per_byte: float


class ResumePlan(NamedTuple):
    """How a request of `prompt_len` tokens will resume at `position`.

    `anchor_pages` pages are read from the device tree; `window_pages` are the window pages reused
    there. `loads` come from the host. `snapshots` are the positions at which later prompts are to
    resume: there the recurrent state is frozen on the way, and the window before them is kept.
    `demand` counts the fresh slots of each pool that the whole prompt needs, loads included, and
    of window pages those that decoding up to `final_len` needs too (`windows`).
    A chunk has at most `chunk_len` tokens.

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
    final_len: int
    chunk_len: int
    windows: WindowDemand = NO_WINDOWS
    load_bytes: int = 0
    load_seconds: float = 0.0
    compute_seconds: float = 0.0
    recompute_seconds: float = 0.0
