"""Sizing: the slots of each pool, from one memory budget and the concurrency asked for.

The inequality that limits concurrency is the recurrent pool's:

    recurrent slots ≥ max_running × (1 + tracking + scratch) + max_prealloc

`tracking` is 0 without a prefix cache on this worker, 1 without overlap, 2 with it (ping-pong).
A worker that prefills for others decodes nothing, so it tracks nothing: its `tracking` is 0, too.
`scratch` is one slot for each draft that a step verifies: it holds the state after that draft until
the draft is accepted. A request that is received has a working slot alone until it runs: it takes
the others then, as far as every row keeps a working slot. Admission reads the same numbers, so
every size given here can run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.window_budget import WindowDemand, most_window_pages
from ferryman.errors import ConfigError

# Parts of the memory beyond the least pools: pages, windows, cached snapshots.
SPARE_PARTS: Mapping[Kind, float] = {Kind.FULL: 1.0, Kind.WINDOW: 0.25, Kind.RECURRENT: 0.25}


@dataclass(frozen=True, slots=True)
class Concurrency:
    """The number of requests a worker holds at once, and the recurrent slots of each.

    A step verifies up to `drafts` tokens of each request. `keeps_prompts` says whether states and
    windows along prompts are cached, which a worker without tracking slots may do as well.
    """

    max_running: int
    max_prealloc: int
    tracking: int
    drafts: int = 0
    keeps_prompts: bool = False

    @property
    def rows(self) -> int:
        return self.max_running + self.max_prealloc

    @property
    def slots_per_request(self) -> int:
        return 1 + self.tracking + self.drafts

    @property
    def uncertain_len(self) -> int:
        """Positions in flight that may be discarded when a window slides; -1 if nothing is kept.

        It is 0 without drafts: a window slides only when a page begins, and by then it is known
        whether the last draw ended the request. It is 1 with drafts: the state at the end of a run
        of drafts is saved by the next step only.
        """
        if not self.tracking and not self.keeps_prompts:
            return -1
        return 1 if self.drafts else 0

    @property
    def recurrent_slots(self) -> int:
        return self.max_running * self.slots_per_request + self.max_prealloc

    def running_in(self, recurrent_slots: int) -> int:
        """The most requests at once for which so many recurrent slots are enough; 0 for none."""
        return max(0, recurrent_slots - self.max_prealloc) // self.slots_per_request

    def inequality(self, recurrent_slots: int) -> str:
        """The inequality with its numbers, as it is printed at start and in errors."""
        drafts = f" + {self.drafts} scratch" if self.drafts else ""
        return (
            f"{self.max_running} running × (1 + {self.tracking} tracking{drafts}) + "
            f"{self.max_prealloc} preallocated = {self.recurrent_slots} recurrent slots needed, "
            f"{recurrent_slots} given"
        )


def tracking_slots(*, prefix_cache: bool, overlap: bool, decodes: bool = True) -> int:
    """Track slots a request needs in addition to its working slot, for states while it decodes."""
    if not prefix_cache or not decodes:
        return 0
    return 2 if overlap else 1


def path_snapshots(recurrent_slots: int) -> int:
    """Snapshots that one path may keep: a quarter, so that no conversation takes them all."""
    return max(2, recurrent_slots // 4)


def prompt_points(manifest: StateManifest, slots: Mapping[Kind, int]) -> int:
    """Resume points that one prompt may add to the tree, 0 for models where every page end is one.

    A path keeps no more snapshots than this. Without recurrent state a point costs a window of
    pages.
    """
    if Kind.RECURRENT in slots:
        return path_snapshots(slots[Kind.RECURRENT])
    window_pages = -(-manifest.window_len // manifest.page_size)
    return max(2, slots.get(Kind.WINDOW, 0) // max(1, window_pages) // 4)


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """Pool sizes with the bytes they take; `warnings` say what was raised and why."""

    slots: Mapping[Kind, int]
    num_bytes: int
    explanation: str
    warnings: tuple[str, ...]

    def max_tokens(self, manifest: StateManifest) -> int:
        """The tokens that one request can reach when it has all pools for itself."""
        if Kind.FULL not in self.slots:
            return 2**31 - 1
        return self.slots[Kind.FULL] * manifest.page_size


def plan_capacity(
    manifest: StateManifest,
    memory_bytes: int,
    concurrency: Concurrency,
    step_tokens: int,
    recurrent_slots: int = 0,
) -> CapacityPlan:
    """Splits `memory_bytes`, a hard cap, over the pools.

    `recurrent_slots` > 0 is an explicit size. If it breaks the inequality, it is raised with a
    warning. Raises ConfigError when the budget cannot hold the smallest pools that work.
    """
    slot_bytes = {layout.kind: layout.slot_bytes for layout in manifest.layouts}
    warnings: list[str] = []
    least = least_slots(manifest, concurrency, step_tokens, recurrent_slots, warnings)
    needed = sum(least[kind] * slot_bytes[kind] for kind in slot_bytes)
    if needed > memory_bytes:
        raise ConfigError(_too_little(memory_bytes, needed, least, slot_bytes, concurrency))
    slots = _spread(least, slot_bytes, memory_bytes - needed, fixed=bool(recurrent_slots))
    num_bytes = sum(slots[kind] * slot_bytes[kind] for kind in slots)
    return CapacityPlan(slots, num_bytes, _explain(slots, slot_bytes, concurrency), tuple(warnings))


def bytes_for(
    manifest: StateManifest,
    concurrency: Concurrency,
    step_tokens: int,
    recurrent_slots: int = 0,
    *,
    num_full: int = 0,
    context: int = 0,
) -> int:
    """The least `memory_bytes` with which `plan_capacity` holds every row, and has pages for
    `num_full` requests of `context` tokens each."""
    slot_bytes = {layout.kind: layout.slot_bytes for layout in manifest.layouts}
    least = least_slots(manifest, concurrency, step_tokens, recurrent_slots, [])
    needed = sum(least[kind] * slot_bytes[kind] for kind in slot_bytes)
    lacking = num_full * -(-context // manifest.page_size) - least.get(Kind.FULL, 0)
    if Kind.FULL not in slot_bytes or lacking <= 0:
        return needed
    parts = _parts(slot_bytes, fixed=bool(recurrent_slots))
    # One page more, because the spare bytes are cut into whole slots.
    return needed + math.ceil((lacking + 1) * slot_bytes[Kind.FULL] / parts[Kind.FULL])


@dataclass(frozen=True, slots=True)
class StateDemand:
    """The bytes of one worker's pools: the least that work, and the most that it has a use for."""

    least: int
    useful: int


def share_memory(budget: int, demands: Sequence[StateDemand]) -> tuple[int, ...]:
    """Divides `budget` bytes among workers: the least to each, then the same part of each one's
    further use.

    Raises ConfigError when the least of all is more than the budget.
    """
    spare = budget - sum(demand.least for demand in demands)
    if spare < 0:
        raise ConfigError(f"state pools need {budget - spare} bytes at least; {budget} are left")
    further = [max(0, demand.useful - demand.least) for demand in demands]
    whole = sum(further)
    if whole <= spare:
        return tuple(d.least + more for d, more in zip(demands, further, strict=True))
    return tuple(d.least + spare * more // whole for d, more in zip(demands, further, strict=True))


def requests_at(
    context: int,
    manifest: StateManifest,
    slots: Mapping[Kind, int],
    concurrency: Concurrency,
    step_tokens: int,
) -> int:
    """The requests of `context` tokens each that these pools hold at once, without any cache."""
    counts = [concurrency.max_running]
    if Kind.FULL in slots:
        counts.append(slots[Kind.FULL] // -(-context // manifest.page_size))
    if Kind.RECURRENT in slots:
        counts.append(slots[Kind.RECURRENT] // concurrency.slots_per_request)
    if Kind.WINDOW in slots:
        window = _window_demand(manifest, concurrency, step_tokens)
        beyond_first = (slots[Kind.WINDOW] - window.most) // max(1, window.after_prompt)
        counts.append(max(0, 1 + beyond_first))
    return min(counts)


def least_slots(
    manifest: StateManifest,
    concurrency: Concurrency,
    step_tokens: int,
    recurrent_slots: int,
    warnings: list[str],
) -> dict[Kind, int]:
    """The fewest slots with which every row makes progress: two pages each, and its window.

    The window pool also has room for one prompt's whole step. A second prompt waits, unless the
    pool is larger.
    """
    least = {Kind.FULL: 2 * concurrency.rows, Kind.RECURRENT: concurrency.recurrent_slots}
    if recurrent_slots and Kind.RECURRENT in manifest.kinds:
        least[Kind.RECURRENT] = _explicit(recurrent_slots, concurrency, warnings)
    if Kind.WINDOW in manifest.kinds:
        window = _window_demand(manifest, concurrency, step_tokens)
        least[Kind.WINDOW] = window.most + (concurrency.rows - 1) * window.after_prompt
    return {kind: least[kind] for kind in manifest.kinds}


def _window_demand(
    manifest: StateManifest, concurrency: Concurrency, step_tokens: int
) -> WindowDemand:
    return most_window_pages(
        manifest,
        step_tokens,
        uncertain_len=concurrency.uncertain_len,
        num_drafts=concurrency.drafts,
    )


def _explicit(recurrent_slots: int, concurrency: Concurrency, warnings: list[str]) -> int:
    if recurrent_slots >= concurrency.recurrent_slots:
        return recurrent_slots
    warnings.append(
        f"recurrent pool raised: {concurrency.inequality(recurrent_slots)}; "
        f"{_smaller_rows(recurrent_slots, concurrency)}"
    )
    return concurrency.recurrent_slots


def _smaller_rows(recurrent_slots: int, concurrency: Concurrency) -> str:
    """The settings with which no pool is raised."""
    least = f"recurrent_slots {concurrency.recurrent_slots}"
    rows = concurrency.running_in(recurrent_slots)
    return f"set {least} or max_running {rows}" if rows else f"set {least}"


def _spread(
    least: Mapping[Kind, int], slot_bytes: Mapping[Kind, int], spare: int, *, fixed: bool
) -> dict[Kind, int]:
    """Divides `spare` bytes among the kinds in shares; an explicit recurrent size does not grow."""
    parts = _parts(slot_bytes, fixed=fixed)
    return {kind: least[kind] + int(spare * parts[kind]) // slot_bytes[kind] for kind in slot_bytes}


def _parts(kinds: Iterable[Kind], *, fixed: bool) -> dict[Kind, float]:
    """The part of the spare bytes that each kind gets; together 1, or 0 if none grows."""
    parts = {k: 0.0 if fixed and k is Kind.RECURRENT else SPARE_PARTS[k] for k in kinds}
    total = sum(parts.values()) or 1.0
    return {kind: part / total for kind, part in parts.items()}


def _too_little(
    memory_bytes: int,
    needed: int,
    least: Mapping[Kind, int],
    slot_bytes: Mapping[Kind, int],
    concurrency: Concurrency,
) -> str:
    parts = ", ".join(f"{least[k]} {k} slots of {slot_bytes[k]} B" for k in slot_bytes)
    return (
        f"memory_bytes={memory_bytes} is too little: {needed} bytes are the least for {parts} "
        f"[{concurrency.inequality(least.get(Kind.RECURRENT, 0))}]; "
        f"raise memory_bytes or lower max_running"
    )


def _explain(
    slots: Mapping[Kind, int], slot_bytes: Mapping[Kind, int], concurrency: Concurrency
) -> str:
    parts = [f"{slots[k]} {k} slots × {slot_bytes[k]} B" for k in slots]
    if Kind.RECURRENT in slots:
        parts.append(concurrency.inequality(slots[Kind.RECURRENT]))
    return "; ".join(parts)
