"""A host tier that holds the prompts which workers share, and workers with room to spare."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from tests.harness.schedule.watch import WatchedWorker
from tests.harness.schedule.worker import MANIFESTS, SIZES, ScheduledWorker, request

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.resume import EMPTY_HOST, HostView
from ferryman.cache.units import HostUnit
from ferryman.engine.memory.transfer import digest_of
from ferryman.schedule.events import Cached

STEMS = ([1] * 9, [1] * 17, [2] * 13)
"""Beginnings of prompts, so that prefixes are shared, forked and evicted."""


def worker_for(manifest: StateManifest, **sizes: int) -> WatchedWorker:
    """A watched worker, with some pools of other sizes than SIZES by their kinds' names."""
    return WatchedWorker(manifest, SIZES | {Kind(name): sizes[name] for name in sizes})


class Host:
    """An arena that another worker wrote by write-through, and its units by key."""

    def __init__(self, manifest: StateManifest) -> None:
        self.arena = bytearray()
        self.units: dict[tuple[Kind, bytes], HostUnit] = {}
        writer = ScheduledWorker(manifest)
        for index, stem in enumerate(STEMS):
            writer.submit(request(manifest, f"w{index}", [*stem, 2, 2, 1], 2))
            writer.drain()
        for cached in writer.seen(Cached):
            for unit in writer.scheduler.chain_units(cached.keys):
                content = bytes(writer.engine.transfer.read(unit.kind, unit.handle.slot))
                host = HostUnit(
                    unit.kind,
                    unit.page_index,
                    unit.key,
                    len(self.arena),
                    len(content),
                    digest_of(content),
                )
                self.units[unit.kind, unit.key] = host
                self.arena += content

    def view(self, keys: tuple[bytes, ...], how: str) -> HostView:
        if how == "no":
            return EMPTY_HOST
        found = {
            (kind, page): self.units[kind, key]
            for page, key in enumerate(keys)
            for kind in Kind
            if (kind, key) in self.units
        }
        if how == "corrupt":
            found = {name: replace(unit, digest=bytes(16)) for name, unit in found.items()}
        return HostView(found)


@lru_cache
def host_for(manifest: StateManifest) -> Host:
    return Host(manifest)


def host_of(name: str) -> Host:
    return host_for(MANIFESTS[name])
