"""The simulated cluster: a prefill and a decode worker, their node's tiers, and the costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ferryman.cache.capacity import Concurrency, plan_capacity, tracking_slots
from ferryman.cache.manifest import Kind, KindLayout, StateManifest
from ferryman.errors import ConfigError
from ferryman.model.config import load_config
from ferryman.model.shapes.manifest import state_manifest
from ferryman.schedule.limits import SchedulerLimits
from ferryman.tiers.layout import ArenaLayout, split_arena
from ferryman.tiers.prefetch_values import DEFAULT_WISH, PrefetchOptions
from ferryman_simulator.modelled_time import GUESSES, CostModel
from ferryman_simulator.options import SimulateOptions, StateOptions

MAX_WAITING = 1_000_000
NO_BOUND = 1 << 30


@dataclass(frozen=True, slots=True)
class WorkerShape:
    """Pool sizes and limits of one worker; `warnings` name the values that were raised, with
    reasons."""

    slots: Mapping[Kind, int]
    limits: SchedulerLimits
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Setup:
    """One cluster of one node. `concurrency` requests run at once, the next one begins when one
    ends; with 0 each begins at its time in the trace. An arena without regions means a node without
    host tier."""

    manifest: StateManifest
    prefill: WorkerShape
    decode: WorkerShape
    arena: ArenaLayout
    costs: CostModel = GUESSES
    storage_bytes: int = 0
    concurrency: int = 0
    write_policy: str = "write_through"
    wish: PrefetchOptions = DEFAULT_WISH
    has_junctions: bool = True
    has_forks: bool = True


def make_setup(choices: SimulateOptions) -> Setup:
    """The simulated cluster. Raises ConfigError for options that cannot work."""
    manifest, max_len = make_manifest(choices.state)
    prefill = _worker(choices, manifest, max_len, is_prefill=True)
    decode = _worker(choices, manifest, max_len, is_prefill=False)
    caches = choices.caches
    if not 0 < caches.snapshot_share < 1:
        raise ConfigError(f"--snapshot-share {caches.snapshot_share}: it should be between 0 and 1")
    arena = ArenaLayout({})
    if caches.host_memory:
        arena = split_arena(manifest, caches.host_memory, caches.snapshot_share)
    return Setup(
        manifest=manifest,
        prefill=prefill,
        decode=decode,
        arena=arena,
        costs=choices.costs,
        storage_bytes=caches.storage_bytes,
        write_policy=caches.write_policy,
        wish=caches.wish,
        has_junctions=caches.junctions,
        has_forks=caches.forks,
        concurrency=choices.concurrency,
    )


def make_manifest(state: StateOptions) -> tuple[StateManifest, int]:
    """The state's manifest and the longest request that the model takes. Reads no weights."""
    if state.page_size & (state.page_size - 1):
        raise ConfigError(f"--page-size {state.page_size} is not a power of two")
    if state.has_bytes:
        return _manifest_of_bytes(state), NO_BOUND
    if not state.model:
        raise ConfigError("choose a --model, or say --page-bytes and --snapshot-bytes")
    config = load_config(Path(state.model))
    manifest = state_manifest(config, state.dtype, state.page_size, fingerprint="simulated")
    return manifest, config.trunk.max_positions


def _manifest_of_bytes(state: StateOptions) -> StateManifest:
    if bool(state.window_len) != bool(state.window_page_bytes):
        raise ConfigError("--window-len and --window-page-bytes come together")
    sizes = {
        Kind.FULL: state.page_bytes,
        Kind.WINDOW: state.window_page_bytes,
        Kind.RECURRENT: state.snapshot_bytes,
    }
    layouts = tuple(KindLayout(kind, (), count) for kind, count in sizes.items() if count)
    chunk = min(state.page_size, 64)
    return StateManifest("simulated", state.page_size, chunk, state.window_len, layouts)


def _worker(
    choices: SimulateOptions, manifest: StateManifest, max_len: int, *, is_prefill: bool
) -> WorkerShape:
    workers, caches = choices.workers, choices.caches
    max_prealloc = workers.max_running if is_prefill else workers.max_reserved
    tracking = tracking_slots(prefix_cache=True, overlap=workers.overlap, decodes=not is_prefill)
    concurrency = Concurrency(workers.max_running, max_prealloc, tracking, keeps_prompts=True)
    slots = workers.prefill_slots if is_prefill else workers.decode_slots
    warnings: tuple[str, ...] = ()
    if not slots:
        capacity = plan_capacity(
            manifest, workers.memory_bytes, concurrency, workers.chunk_tokens, workers.slots
        )
        slots, warnings = capacity.slots, capacity.warnings
    if set(slots) != set(manifest.kinds):
        raise ConfigError(f"slots of {', '.join(manifest.kinds)} make up this model's pools")
    most = slots[Kind.FULL] * manifest.page_size if Kind.FULL in slots else NO_BOUND
    limits = SchedulerLimits(
        concurrency=concurrency,
        chunk_tokens=workers.chunk_tokens,
        max_len=min(max_len, most),
        max_waiting=MAX_WAITING,
        steps_in_flight=2 if workers.overlap else 1,
        prefix_cache=True,
        snapshot_grid=caches.grid,
    )
    return WorkerShape(slots, limits, warnings)
