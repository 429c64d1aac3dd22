"""The stuff of random schedules: models, workers of random pools and options, and events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random

from tests.doubles.stamps import fake_manifest
from tests.harness.schedule.drafts import RandomDrafts
from tests.harness.schedule.watch import WatchedWorker
from tests.harness.schedule.worker import PAGE

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.window_budget import most_window_pages
from ferryman.schedule.drafting import NO_DRAFTS
from ferryman.schedule.limits import IN_TURNS, PREFILL_FIRST, TOGETHER

FULL, WINDOW, RECURRENT = Kind.FULL, Kind.WINDOW, Kind.RECURRENT
MODELS = {
    "full": (FULL,),
    "recurrent": (RECURRENT,),
    "window": (WINDOW,),
    "full and recurrent": (FULL, RECURRENT),
    "full and window": (FULL, WINDOW),
    "window and recurrent": (WINDOW, RECURRENT),
    "all kinds": (FULL, WINDOW, RECURRENT),
}
WINDOW_LENS = (1, 2, 4, 5, 6, 9, 12)
EVENTS = {
    "arrive": 5,
    "reserve": 4,
    "advance": 12,
    "hand_over": 4,
    "give_up": 1,
    "cancel": 1,
    "bury": 2,
    "offer_host": 2,
    "let_go": 2,
    "flush": 0.3,
    "measure": 0.5,
}


def any_model(rng: Random) -> StateManifest:
    """One of MODELS, with a window of one to three pages where it has one."""
    name, window_len = rng.choice(sorted(MODELS)), rng.choice(WINDOW_LENS)
    return _model(name, window_len if WINDOW in MODELS[name] else 0)


@lru_cache
def _model(name: str, window_len: int) -> StateManifest:
    return fake_manifest(PAGE, kinds=MODELS[name], window_len=window_len)


def _least_windows(manifest: StateManifest, num_drafts: int) -> int:
    """With fewer the longest prompts cannot run, and with these nothing is kept of them."""
    if not manifest.window_len:
        return 0
    return most_window_pages(manifest, manifest.scan_chunk, num_drafts=num_drafts).most


def tiny_worker(rng: Random, manifest: StateManifest) -> WatchedWorker:
    """A worker with a few slots of each kind, and any options."""
    sizes = {FULL: rng.randint(5, 16), RECURRENT: rng.randint(2, 6)}
    drafts = rng.choice([0, 0, 0, rng.randint(1, min(5, sizes[RECURRENT] - 1))])
    spare = rng.choice([-1, 0, 0, 0, 1, 2, 3, 6])
    sizes[WINDOW] = max(1, _least_windows(manifest, drafts) + spare)
    return WatchedWorker(
        manifest,
        sizes,
        overlap=rng.random() < 0.6,
        prefix_cache=rng.random() < 0.8,
        max_running=rng.randint(1, 4),
        chunk_tokens=rng.choice([4, 6, 8, 8, 13, 64]),
        snapshot_grid=rng.choice([0, 0, 4, 8]),
        drafting=RandomDrafts(drafts, seed=rng.randrange(99)) if drafts else NO_DRAFTS,
        order=rng.choice([PREFILL_FIRST, IN_TURNS, TOGETHER]),
    )


@dataclass(frozen=True)
class ScheduleKind:
    """The models and the workers of random schedules, and how often each event comes in them."""

    draw_model: Callable[[Random], StateManifest] = any_model
    draw_worker: Callable[[Random, StateManifest], WatchedWorker] = tiny_worker
    events: Mapping[str, float] = field(default_factory=EVENTS.copy)
