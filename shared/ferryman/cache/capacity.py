"""Sizing: how many slots each pool gets, from one memory budget and the concurrency asked for.

The inequality that limits concurrency is the recurrent pool's:

    recurrent slots ≥ (max_running + max_prealloc) × (1 + tracking + scratch)

`tracking` is 0 without a prefix cache on this worker, 1 without overlap, 2 with it (ping-pong).
`scratch` is one for each draft that a step verifies: the state behind it, until it is accepted.
Admission reads the same numbers, so what is sized here is what can run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.window_budget import most_window_pages
from ferryman.errors import ConfigError

# The share of what is left after the least pools that goes to cached snapshots; the rest is pages.
SNAPSHOT_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Concurrency:
    """How many requests a worker holds at once, and what each costs in recurrent slots.

    A step verifies up to `drafts` tokens of each.
    """

    max_running: int
    max_prealloc: int
    tracking: int
    drafts: int = 0

    @property
    def rows(self) -> int:
        return self.max_running + self.max_prealloc

    @property
    def slots_per_request(self) -> int:
        return 1 + self.tracking + self.drafts

    @property
    def uncertain_len(self) -> int:
        """Positions in flight that may not count, when a window slides; -1: nothing is kept.

        None as a rule: windows slide where a page begins, and a draw that ends a request is known
        by then. Where a run of drafts ends, the state of that position is saved by the step that
        goes on.
        """
        if not self.tracking:
            return -1
        return 1 if self.drafts else 0

    @property
    def recurrent_slots(self) -> int:
        return self.rows * self.slots_per_request

    def inequality(self, recurrent_slots: int) -> str:
        """The inequality with its numbers, as it is printed at start and in errors."""
        drafts = f" + {self.drafts} scratch" if self.drafts else ""
        return (
            f"({self.max_running} running + {self.max_prealloc} preallocated) × "
            f"(1 + {self.tracking} tracking{drafts}) = {self.recurrent_slots} recurrent slots "
            f"needed, "
            f"{recurrent_slots} given"
        )


def tracking_slots(*, prefix_cache: bool, overlap: bool) -> int:
    """Track slots a request needs besides its working slot."""
    return 0 if not prefix_cache else 2 if overlap else 1


def path_snapshots(recurrent_slots: int) -> int:
    """Snapshots that one path may keep: a quarter, so that no conversation takes them all."""
    return max(2, recurrent_slots // 4)


def prompt_points(manifest: StateManifest, slots: Mapping[Kind, int]) -> int:
    """Resume points that one prompt may leave behind, 0 where all page ends are some anyway.

    A path keeps no more snapshots; and without recurrent state a point costs a window of pages.
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
        """Tokens that one request alone can reach: what the pools can ever hold."""
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

    `recurrent_slots` > 0 is an explicit size: raised with a warning when it breaks the inequality.
    Raises ConfigError when the budget cannot hold the least that works.
    """
    slot_bytes = {layout.kind: layout.slot_bytes for layout in manifest.layouts}
    least = _least(manifest, concurrency, step_tokens)
    warnings: list[str] = []
    if recurrent_slots and Kind.RECURRENT in slot_bytes:
        least[Kind.RECURRENT] = _explicit(recurrent_slots, concurrency, warnings)
    needed = sum(least[kind] * slot_bytes[kind] for kind in slot_bytes)
    if needed > memory_bytes:
        raise ConfigError(_too_little(memory_bytes, needed, least, slot_bytes, concurrency))
    slots = _spread(least, slot_bytes, memory_bytes - needed, fixed=bool(recurrent_slots))
    num_bytes = sum(slots[kind] * slot_bytes[kind] for kind in slots)
    return CapacityPlan(slots, num_bytes, _explain(slots, slot_bytes, concurrency), tuple(warnings))


def _least(manifest: StateManifest, concurrency: Concurrency, step_tokens: int) -> dict[Kind, int]:
    """The least that lets every row make progress: two pages each, and its window.

    One prompt at a time needs a whole step besides; a second one waits, or the pool is larger.
    """
    least = {Kind.FULL: 2 * concurrency.rows, Kind.RECURRENT: concurrency.recurrent_slots}
    if Kind.WINDOW in manifest.kinds:
        window = most_window_pages(
            manifest,
            step_tokens,
            uncertain_len=concurrency.uncertain_len,
            num_drafts=concurrency.drafts,
        )
        least[Kind.WINDOW] = window.most + (concurrency.rows - 1) * window.behind_prompt
    return {kind: least[kind] for kind in manifest.kinds}


def _explicit(recurrent_slots: int, concurrency: Concurrency, warnings: list[str]) -> int:
    if recurrent_slots >= concurrency.recurrent_slots:
        return recurrent_slots
    warnings.append(f"recurrent pool raised: {concurrency.inequality(recurrent_slots)}")
    return concurrency.recurrent_slots


def _spread(
    least: Mapping[Kind, int], slot_bytes: Mapping[Kind, int], spare: int, *, fixed: bool
) -> dict[Kind, int]:
    """Gives what is left to the kinds in shares; an explicit recurrent size stays as it is."""
    shares = {Kind.FULL: 1.0, Kind.WINDOW: 0.25, Kind.RECURRENT: 0.0 if fixed else SNAPSHOT_SHARE}
    total = sum(shares[kind] for kind in slot_bytes) or 1.0
    return {
        kind: least[kind] + int(spare * shares[kind] / total) // slot_bytes[kind]
        for kind in slot_bytes
    }


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
