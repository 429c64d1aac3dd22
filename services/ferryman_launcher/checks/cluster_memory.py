"""The memory of a cluster on this machine, planned before any of its processes starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ferryman.settings.cluster import UpOptions, WorkerRole
from ferryman.settings.declaration import leaves, size_text
from ferryman.settings.engine import EngineOptions, engine_options
from ferryman.settings.workers import BothSettings, DecodeSettings, PrefillSettings
from ferryman.sizing.machine import MachineResources, this_machine
from ferryman.sizing.memory_plan import MemoryPlan, MemoryPlanner
from ferryman.sizing.worker_size import WorkerGroup, WorkerPlan
from ferryman_launcher.checks.model_places import EVERYTHING_HERE, ModelPlaces

# Router, host-caches without their arenas, nats-server, Redis and the launcher, and the libraries
# that all of them share (measured, with the demo model).
OTHERS_BYTES = 700 << 20
CONTEXTS = (4096, 32_768, 131_072)
DERIVED = ("dtype", "device", "memory_bytes", "max_running", "chunk_tokens")


def plan_memory(
    choices: UpOptions,
    places: ModelPlaces = EVERYTHING_HERE,
    machine: MachineResources | None = None,
) -> MemoryPlan:
    """The workers with complete options. Raises ConfigError, saying what would fit, if they do not
    fit into this machine."""
    tiers = choices.tiers
    planner = MemoryPlanner(
        model=places.files(choices.engine.model),
        machine=machine or this_machine(),
        draft=places.files(Path(choices.draft_model)) if choices.draft_model else None,
        memory=choices.memory,
        reserved=OTHERS_BYTES + tiers.arena_bytes * tiers.num_nodes,
    )
    return planner.plan(worker_groups(choices))


def worker_groups(choices: UpOptions) -> tuple[WorkerGroup, ...]:
    """The workers as they were asked for, with what was set for one role alone."""
    return tuple(
        WorkerGroup(workers.role, _settings_of(choices, workers).engine, workers.number)
        for workers in choices.roles
    )


def _settings_of(
    choices: UpOptions, workers: WorkerRole
) -> PrefillSettings | DecodeSettings | BothSettings:
    engine = _engine_of(choices, workers.role, workers.tp_size)
    if workers.role == "prefill":
        return PrefillSettings(worker=engine)
    kind = BothSettings if workers.role == "both" else DecodeSettings
    settings, rows = choices.told.get(workers.role, {}), ("max_reserved", "audit_share")
    chosen = {name: settings[name] for name in rows if name in settings.keys() & kind.model_fields}
    return kind.model_validate({"worker": engine, **chosen})


def _engine_of(choices: UpOptions, role: str, tp_size: int) -> EngineOptions:
    settings = choices.told.get(role, {})
    names = [leaf.name for leaf in leaves(EngineOptions)]
    values = choices.engine.model_dump() | {
        name: settings[name] for name in names if name in settings
    }
    fixed = {"model": choices.engine.model, "draft": choices.engine.draft, "tp_size": tp_size}
    return engine_options(**{name: values[name] for name in names} | fixed)


def derived_values(plan: MemoryPlan) -> Mapping[str, Mapping[str, Any]]:
    """The values that follow from model and machine, by role and name."""
    asked = {role: {"asked_running": limit.asked} for role, limit in plan.limits.items()}
    return {
        worker.role: {name: getattr(worker.options, name) for name in DERIVED}
        | asked.get(worker.role, {})
        for worker in plan.workers
    }


def worker_line(worker: WorkerPlan) -> str:
    """For people: `decode: bfloat16 on cpu, 3.1G of weights + 2G of state: …`"""
    many = f"{worker.count} × " if worker.count > 1 else ""
    options, fits = worker.options, ""
    for context in CONTEXTS:
        if count := worker.requests_at(context):
            fits += f", {count} at {context:,}"
    return (
        f"{many}{worker.role}: {options.dtype} on {options.device}, "
        f"{size_text(worker.weight_bytes)} of {worker.weights_name} + "
        f"{size_text(worker.capacity.num_bytes)} of state: "
        f"requests up to {worker.max_len:,} tokens{fits}"
    )


def worker_lines(plan: MemoryPlan) -> tuple[str, ...]:
    """For people: a line for each role, and one for each that runs fewer requests than asked."""
    limits = (f"{role}: {limit.sentence}" for role, limit in plan.limits.items())
    return (*map(worker_line, plan.workers), *limits)


def worker_objects(plan: MemoryPlan) -> tuple[Mapping[str, Any], ...]:
    """For programs: the plan of each role; `limit` is null where all run that were asked for."""
    limits = {role: limit.as_object() for role, limit in plan.limits.items()}
    return tuple(
        {**_worker_object(worker), "limit": limits.get(worker.role)} for worker in plan.workers
    )


def _worker_object(worker: WorkerPlan) -> Mapping[str, Any]:
    options = worker.options
    return {
        "role": worker.role,
        "count": worker.count,
        "dtype": options.dtype,
        "device": options.device,
        "quantize": options.quantize,
        "weight_bytes": worker.weight_bytes,
        "step_bytes": worker.step_bytes,
        "state_bytes": worker.capacity.num_bytes,
        "num_bytes": worker.num_bytes,
        "slot_bytes": {str(layout.kind): layout.slot_bytes for layout in worker.manifest.layouts},
        "slots": {str(kind): count for kind, count in worker.capacity.slots.items()},
        "slots_per_request": options.concurrency.slots_per_request,
        "page_size": options.page_size,
        "max_running": options.max_running,
        "chunk_tokens": options.chunk_tokens,
        "max_len": worker.max_len,
        "requests": {str(context): worker.requests_at(context) for context in CONTEXTS},
    }
