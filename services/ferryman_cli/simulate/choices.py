"""What a caller of `ferryman simulate` may choose, and the setup that it means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ferryman.cache.capacity import Concurrency, plan_capacity, tracking_slots
from ferryman.cache.manifest import Kind, KindLayout, StateManifest
from ferryman.errors import ConfigError
from ferryman.model.config import load_config
from ferryman.model.manifest import state_manifest
from ferryman.runtime.settings import PREFETCH_THRESHOLD
from ferryman.schedule.limits import SchedulerLimits
from ferryman.tiers.layout import SNAPSHOT_SHARE, ArenaLayout, split_arena
from ferryman.tiers.prefetch_values import PrefetchPolicy, PrefetchWish
from ferryman.tiers.write_policy import write_policy_named
from ferryman_cli.simulate.costs import GUESSES, CostModel
from ferryman_cli.simulate.setup import Setup, WorkerShape

MAX_RESERVED = 8
DEFAULT_WISH = PrefetchWish(PrefetchPolicy.TIMEOUT, PREFETCH_THRESHOLD)
MAX_WAITING = 1_000_000
NO_BOUND = 1 << 30


@dataclass(frozen=True, slots=True)
class StateChoices:
    """Whose state it is: a model's, or slots of so many bytes (0: the model has no such kind)."""

    model: Path | None = None
    dtype: str = "float32"
    page_size: int = 16
    page_bytes: int = 0
    snapshot_bytes: int = 0
    window_len: int = 0
    window_page_bytes: int = 0


@dataclass(frozen=True, slots=True)
class WorkerChoices:
    """Both workers. `slots` are recurrent slots of each (0: a share of `memory_bytes`);
    `prefill_slots` and `decode_slots` set the pools outright, as a ledger shows them."""

    memory_bytes: int = 512 << 20
    max_running: int = 32
    max_reserved: int = MAX_RESERVED
    chunk_tokens: int = 512
    overlap: bool = True
    slots: int = 0
    prefill_slots: Mapping[Kind, int] = field(default_factory=dict)
    decode_slots: Mapping[Kind, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CacheChoices:
    """The tiers, and where snapshots are placed. 0 bytes is a tier that is not there."""

    host_memory: int = 256 << 20
    snapshot_share: float = SNAPSHOT_SHARE
    storage_bytes: int = 0
    write_policy: str = "write_through"
    wish: PrefetchWish = DEFAULT_WISH
    grid: int = 0
    junctions: bool = True


@dataclass(frozen=True, slots=True)
class Choices:
    """Everything but the trace."""

    state: StateChoices = StateChoices()
    workers: WorkerChoices = WorkerChoices()
    caches: CacheChoices = CacheChoices()
    costs: CostModel = GUESSES
    concurrency: int = 0


def make_setup(choices: Choices) -> Setup:
    """What is simulated. Raises ConfigError for what cannot work."""
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
        concurrency=choices.concurrency,
    )


def make_manifest(state: StateChoices) -> tuple[StateManifest, int]:
    """The state's manifest and the longest request that the model takes. Reads no weights."""
    if state.page_size & (state.page_size - 1):
        raise ConfigError(f"--page-size {state.page_size} is not a power of two")
    if state.page_bytes or state.snapshot_bytes or state.window_page_bytes:
        return _manifest_of_bytes(state), NO_BOUND
    if state.model is None:
        raise ConfigError("choose a --model, or say --page-bytes and --snapshot-bytes")
    config = load_config(state.model)
    manifest = state_manifest(config, state.dtype, state.page_size, fingerprint="simulated")
    return manifest, config.trunk.max_positions


def _manifest_of_bytes(state: StateChoices) -> StateManifest:
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
    choices: Choices, manifest: StateManifest, max_len: int, *, is_prefill: bool
) -> WorkerShape:
    workers, caches = choices.workers, choices.caches
    max_prealloc = workers.max_running if is_prefill else workers.max_reserved
    tracking = tracking_slots(prefix_cache=True, overlap=workers.overlap)
    concurrency = Concurrency(workers.max_running, max_prealloc, tracking)
    slots = workers.prefill_slots if is_prefill else workers.decode_slots
    warnings: tuple[str, ...] = ()
    if not slots:
        capacity = plan_capacity(
            manifest, workers.memory_bytes, concurrency, workers.chunk_tokens, workers.slots
        )
        slots, warnings = capacity.slots, capacity.warnings
    if set(slots) != set(manifest.kinds):
        raise ConfigError(f"slots of {', '.join(manifest.kinds)} make up this model's pools")
    write_policy_named(caches.write_policy)
    if caches.grid % manifest.page_size:
        raise ConfigError(f"grid {caches.grid} is no multiple of the page size")
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


def parse_slots(flag: str, text: str) -> dict[Kind, int]:
    """`full=512,recurrent=64` as pools. Raises ConfigError."""
    found: dict[Kind, int] = {}
    for part in filter(None, text.split(",")):
        name, _, count = part.partition("=")
        if name not in Kind.__members__.values() or not count.isdecimal() or not int(count):
            known = ", ".join(kind.value for kind in Kind)
            raise ConfigError(f"{flag} {part}: it should be KIND=COUNT; kinds are {known}")
        found[Kind(name)] = int(count)
    return found
