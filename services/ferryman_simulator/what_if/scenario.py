"""A simulated cluster of the settings that processes have.

Several workers of a role become one worker with the memory and the pace of all of them, and several
nodes one node: the calibration says whether that holds.
"""

from __future__ import annotations

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.model.config import load_config
from ferryman.model.shapes.manifest import state_manifest
from ferryman.schedule.limits import SchedulerLimits
from ferryman.settings.engine import EngineOptions
from ferryman.tiers.layout import split_arena
from ferryman.tiers.prefetch_values import PrefetchOptions, PrefetchPolicy
from ferryman_simulator.modelled_time import CostModel
from ferryman_simulator.setup import MAX_WAITING, NO_BOUND, Setup, WorkerShape
from ferryman_simulator.what_if.served_settings import ServedFleet, ServedSettings


def scenario_setup(served: ServedSettings, fleet: ServedFleet, costs: CostModel) -> Setup:
    """Reads the model's config, and no weights. Raises ConfigError for settings with which no
    worker would start."""
    manifest, max_len = _manifest(served.prefill.worker)
    node, policies = served.hostcache, served.prefill.hostcache
    return Setup(
        manifest=manifest,
        prefill=_shape(served.prefill.engine, manifest, max_len, fleet.num_prefill),
        decode=_shape(served.decode.engine, manifest, max_len, fleet.num_decode),
        arena=split_arena(manifest, node.memory_bytes * fleet.num_nodes, node.snapshot_share),
        costs=costs,
        storage_bytes=served.storage_bytes * fleet.num_nodes,
        write_policy=policies.write_policy,
        wish=PrefetchOptions(PrefetchPolicy(policies.prefetch_policy), policies.prefetch_threshold),
    )


def pools_differ(setup: Setup, fleet: ServedFleet) -> str:
    """The words for pools that are not those of the workers; empty if they are, or nobody knows."""
    planned = {
        "prefill": (setup.prefill, fleet.num_prefill),
        "decode": (setup.decode, fleet.num_decode),
    }
    for role, (shape, count) in planned.items():
        heard = {kind: slots * count for kind, slots in fleet.slots.get(role, {}).items()}
        mine = {str(kind): slots for kind, slots in shape.slots.items()}
        if heard and count == 1 and heard != mine:
            return f"{role} has pools of {_words(heard)}, its settings give {_words(mine)}"
    return ""


def _words(slots: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in slots.items())


def _manifest(engine: EngineOptions) -> tuple[StateManifest, int]:
    config = load_config(engine.model)
    manifest = state_manifest(
        config, engine.dtype, engine.page_size, fingerprint="simulated", kv_dtype=engine.kv_dtype
    )
    return manifest, config.trunk.max_positions


def _shape(engine: EngineOptions, manifest: StateManifest, max_len: int, count: int) -> WorkerShape:
    changes = {
        name: getattr(engine, name) * count
        for name in ("memory_bytes", "max_running", "max_prealloc", "recurrent_slots")
    }
    several = engine.model_copy(update=changes)
    capacity = several.capacity(manifest)
    most = capacity.slots.get(Kind.FULL, NO_BOUND) * manifest.page_size // count
    limits = SchedulerLimits(
        concurrency=several.concurrency,
        chunk_tokens=engine.chunk_tokens,
        max_len=min(max_len, most),
        max_waiting=MAX_WAITING,
        steps_in_flight=2 if engine.overlap else 1,
        prefix_cache=engine.prefix_cache,
        snapshot_grid=engine.snapshot_grid,
    )
    return WorkerShape(capacity.slots, limits, capacity.warnings)
