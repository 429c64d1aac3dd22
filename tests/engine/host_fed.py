"""The offline engine with a host tier: what a prompt's keys find there comes with the request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from mmap import mmap
from pathlib import Path
from typing import Any, TypeVar

import pytest

from ferryman.cache.keys import PageKey, as_token_ids, page_keys
from ferryman.cache.manifest import Kind
from ferryman.cache.resume import NO_SHORTFALL, HostView, ResumePlan, Shortfall
from ferryman.cache.units import HostUnit, Tier
from ferryman.engine.memory.transfer import digest_of
from ferryman.llm import LLM, Completion
from ferryman.schedule.events import CachedUnit, Event, Retracted, SequenceAdmitted
from ferryman.schedule.limits import PREFILL_FIRST, StepOrder
from ferryman.schedule.request import Request, SamplingParams
from ferryman.schedule.sequence import Goal

MEGABYTE = 1 << 20
PAGE_SIZE = 16


@dataclass(frozen=True)
class Cell:
    """One way to run: how prompts are cut, and what the engine does at once."""

    chunk_tokens: int
    overlap: bool
    prefix_cache: bool = True
    memory_bytes: int = 64 * MEGABYTE
    max_running: int = 6
    recurrent_slots: int = 0
    snapshot_grid: int = 0
    tp_size: int = 1
    draft: str = ""
    dtype: str = "float64"
    quantize: str = "none"
    order: StepOrder = PREFILL_FIRST


@dataclass
class HostMemory:
    """An arena that grows, the units in it, and what slower tiers held back, by a chain's end."""

    arena: bytearray = field(default_factory=bytearray)
    units: dict[tuple[Kind, PageKey], HostUnit] = field(default_factory=dict)
    shortfalls: dict[PageKey, Shortfall] = field(default_factory=dict)

    def put(
        self, kind: Kind, page: int, key: PageKey, content: bytes, origin: Tier = Tier.HOST
    ) -> None:
        place = len(self.arena), len(content), digest_of(content)
        self.units[kind, key] = HostUnit(kind, page, key, *place, origin)
        self.arena += content

    def take(self, other: HostMemory, keys: Sequence[PageKey]) -> None:
        """All that another one has of a chain."""
        view = other.view(keys)
        for (kind, page), unit in view.units.items():
            self.put(kind, page, unit.key, other.content(unit), unit.origin)
        self.shortfalls[keys[-1]] = view.shortfall

    def content(self, unit: HostUnit) -> bytes:
        return bytes(self.arena[unit.offset : unit.offset + unit.num_bytes])

    def view(self, keys: Sequence[PageKey]) -> HostView:
        """All that is here of a chain."""
        units = {
            (kind, page): self.units[kind, key]
            for page, key in enumerate(keys)
            for kind in Kind
            if (kind, key) in self.units
        }
        return HostView(
            units, self.shortfalls.get(keys[-1], NO_SHORTFALL) if keys else NO_SHORTFALL
        )


def mapped(content: bytes | bytearray) -> memoryview:
    """A copy of the content in pages of its own, as a worker maps an arena."""
    arena = memoryview(mmap(-1, max(1, len(content))))
    arena[: len(content)] = content
    return arena[: len(content)]


class HostFed(LLM):
    """Requests are given what `host` holds of them, as a worker does it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.host = HostMemory()
        self._plans: dict[str, ResumePlan] = {}

    def attach(self, host: HostMemory) -> None:
        """From now on requests find this; the engine loads from what it holds now."""
        self.host = host
        self._engine.host_tier.attach(mapped(host.arena))

    def keys_of(self, prompt: Sequence[int]) -> tuple[PageKey, ...]:
        return page_keys(self._root, as_token_ids(prompt), self._engine.manifest.page_size)

    def arrive(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams
    ) -> list[tuple[Completion, ResumePlan]]:
        """The completions of all prompts at once, each with the plan of its first admission."""
        self._plans.clear()
        found = self.generate(prompts, sampling)
        assert len(self._plans) == len(prompts)
        in_order = sorted(self._plans, key=lambda name: int(name.split("-")[1]))
        return list(zip(found, (self._plans[name] for name in in_order), strict=True))

    def write_through(self, prompt: Sequence[int]) -> None:
        """Copies a prompt's units from the device to the arena."""
        self.copy(self._engine.scheduler.chain_units(self.keys_of(prompt)))

    def copy(self, units: Iterable[CachedUnit]) -> None:
        """From the device to the arena."""
        for unit in units:
            content = bytes(self._engine.transfer.read(unit.kind, unit.handle.slot))
            self.host.put(unit.kind, unit.page_index, unit.key, content)
        self.attach(self.host)

    def forget(self, kind: Kind | None = None) -> int:
        """The device's cache loses one kind, or all."""
        scheduler = self._engine.scheduler
        if kind is None:
            return scheduler.flush()
        pool = scheduler.allocator.pools[kind]
        before = pool.num_free
        scheduler.allocator.make_room({kind: pool.num_slots})
        return pool.num_free - before

    def _submit(self, request: Request) -> None:
        view = self.view_of_host(request.keys)
        self._engine.scheduler.submit(request, Goal.DECODE, view)

    def view_of_host(self, keys: Sequence[PageKey]) -> HostView:
        """The view that a request with these keys is given."""
        return self.host.view(keys)

    def _apply(self, event: Event, answers: Any) -> None:
        if isinstance(event, SequenceAdmitted) and not event.is_resumed:
            self._plans[event.request_id] = event.plan
        super()._apply(event, answers)


class PutsAway(HostFed):
    """Moves the state of a retracted request from the device to the host."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.resumed: list[ResumePlan] = []
        self._engine.scheduler.retraction.pin_retracted()

    def _apply(self, event: Event, answers: Any) -> None:
        if isinstance(event, Retracted):
            self._put_away(event)
        elif isinstance(event, SequenceAdmitted) and event.is_resumed:
            self.resumed.append(event.plan)
        super()._apply(event, answers)

    def _put_away(self, event: Retracted) -> None:
        scheduler, keys = self._engine.scheduler, event.request.keys
        self.copy(scheduler.resume_units(keys))
        scheduler.retraction.release_retracted(event.request_id)
        self.forget()
        assert scheduler.offer_host(event.request_id, self.host.view(keys))


Fed = TypeVar("Fed", bound=HostFed)


def engine_of(kind: type[Fed], folder: Path, cell: Cell, page_size: int = PAGE_SIZE) -> Fed:
    made = kind(
        folder,
        dtype=cell.dtype,
        quantize=cell.quantize,
        page_size=page_size,
        chunk_tokens=cell.chunk_tokens,
        max_running=cell.max_running,
        memory_bytes=cell.memory_bytes,
        recurrent_slots=cell.recurrent_slots,
        snapshot_grid=cell.snapshot_grid,
        prefix_cache=cell.prefix_cache,
        overlap=cell.overlap,
        tp_size=cell.tp_size,
        draft=cell.draft,
    )
    scheduler = made._engine.scheduler
    scheduler.limits = replace(scheduler.limits, order=cell.order)
    return made


def engine(folder: Path, cell: Cell) -> HostFed:
    return engine_of(HostFed, folder, cell)


def assert_same(found: Completion, expected: Completion) -> None:
    assert found.token_ids == expected.token_ids
    for mine, theirs in zip(found.logprobs, expected.logprobs, strict=True):
        assert mine.keys() == theirs.keys()
        assert mine == pytest.approx(theirs, abs=1e-12, rel=0)
