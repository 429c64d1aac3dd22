"""`ferryman fit`: what of a model fits into this machine, before anything is loaded or started."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from ferryman.cache.manifest import Kind
from ferryman.settings.cluster import UpOptions
from ferryman.settings.declaration import size_text
from ferryman.sizing.machine import MachineResources, this_machine
from ferryman.sizing.memory_plan import MemoryPlan
from ferryman.sizing.worker_size import WorkerPlan, stored_dtype
from ferryman_launcher.checks.cluster_memory import CONTEXTS, plan_memory, worker_objects
from ferryman_launcher.checks.model_places import ModelPlaces
from ferryman_launcher.checks.option_checks import check_model

_UNITS = {Kind.FULL: "page", Kind.WINDOW: "window page", Kind.RECURRENT: "recurrent slot"}


def run_fit(choices: UpOptions, places: ModelPlaces, *, as_json: bool) -> int:
    """Prints the plan that `ferryman up` with the same options would follow."""
    check_model(choices.engine.model)
    machine = this_machine()
    plan = plan_memory(choices, places, machine)
    if as_json:
        print(json.dumps(_as_object(plan, machine)))
    else:
        _print(plan, choices.served_name, machine)
    return 0


def _print(plan: MemoryPlan, name: str, machine: MachineResources) -> None:
    console = Console(soft_wrap=True, highlight=False)
    stored = _stored_bytes(plan)
    console.print(f"{name}: {size_text(stored)} in files, {stored_dtype(plan.model)}", markup=False)
    console.print(_machine_line(machine), markup=False)
    for note in plan.notes:
        console.print(f"dtype {note}", markup=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for worker in plan.workers:
        table.add_column(_heading(worker), justify="right")
    for label, cells in _rows(plan.workers):
        table.add_row(label, *cells)
    console.print(table)
    for role, limit in plan.limits.items():
        console.print(f"{role}: {limit.sentence}", markup=False)
    console.print(f"All workers together: {size_text(plan.num_bytes)}.", markup=False)


def _stored_bytes(plan: MemoryPlan) -> int:
    return sum(tensor.num_bytes for tensor in plan.model.tensors.values())


def _machine_line(machine: MachineResources) -> str:
    bfloat16 = "with" if machine.has_bfloat16 else "without"
    cards = ", ".join(f"{card.name} ({size_text(card.free_bytes)})" for card in machine.cards)
    return (
        f"this machine: {size_text(machine.free_bytes)} free ({machine.limited_by}), a processor "
        f"{bfloat16} bfloat16 instructions, {cards or 'no card'}"
    )


def _heading(worker: WorkerPlan) -> str:
    return f"{worker.count} × {worker.role}" if worker.count > 1 else worker.role


def _rows(workers: tuple[WorkerPlan, ...]) -> Iterator[tuple[str, list[str]]]:
    """Every line of the table: its label, and a cell for each role."""

    def line(label: str, cells: Iterable[object]) -> tuple[str, list[str]]:
        return label, [str(cell) for cell in cells]

    yield line("dtype, device", (f"{w.options.dtype} {w.options.device}" for w in workers))
    yield line(workers[0].weights_name, (size_text(w.weight_bytes) for w in workers))
    yield line("process and steps", (size_text(w.step_bytes) for w in workers))
    yield line("state pools", (size_text(w.capacity.num_bytes) for w in workers))
    yield line("together", (size_text(w.num_bytes) for w in workers))
    for layout in workers[0].manifest.layouts:
        sizes = (w.manifest.layout(layout.kind).slot_bytes for w in workers)
        yield line(f"a {_unit(layout.kind, workers[0])}", map(size_text, sizes))
        yield line(
            f"  {layout.kind} slots", (f"{w.capacity.slots[layout.kind]:,}" for w in workers)
        )
    if Kind.RECURRENT in workers[0].capacity.slots:
        needs = (w.options.concurrency.slots_per_request for w in workers)
        yield line("recurrent slots of a request", needs)
    yield line("requests at once", (w.options.max_running for w in workers))
    yield line("tokens of a step", (f"{w.options.chunk_tokens:,}" for w in workers))
    yield line("longest request, tokens", (f"{w.max_len:,}" for w in workers))
    for context in CONTEXTS:
        counts = (w.requests_at(context) or "-" for w in workers)
        yield line(f"requests of {context:,} tokens", counts)


def _unit(kind: Kind, worker: WorkerPlan) -> str:
    of_tokens = "" if kind is Kind.RECURRENT else f" of {worker.options.page_size} tokens"
    return f"{_UNITS[kind]}{of_tokens}"


def _as_object(plan: MemoryPlan, machine: MachineResources) -> Mapping[str, Any]:
    return {
        "stored_dtype": stored_dtype(plan.model),
        "stored_bytes": _stored_bytes(plan),
        "free_bytes": machine.free_bytes,
        "limited_by": machine.limited_by,
        "notes": list(plan.notes),
        "num_bytes": plan.num_bytes,
        "workers": list(worker_objects(plan)),
    }
