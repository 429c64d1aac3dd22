"""The copy of units into the host-cache's arena, off the event loop.

A copy ends, also after an error, only when no thread reads a source or writes to the arena any
more: before that neither the room nor the slots on the device may be given back.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from ferryman.cache.manifest import Kind
from ferryman.cancellation import ended
from ferryman.errors import Unavailable
from ferryman.handoff.values import UnitDigest
from ferryman.wire.codec.scalars import kind_from_wire
from ferryman.wire.hostcache.copy_pace import ALL_AT_ONCE, CopyPace
from ferryman.wire.v1 import hostcache_pb2 as pb


@dataclass(frozen=True, slots=True)
class UnitSource:
    """One unit to be stored. `copy` brings its bytes into a view of exactly its size and returns
    their xxh3-128; it runs on a thread of its own, at most once."""

    kind: Kind
    page_index: int
    copy: Callable[[memoryview], bytes]


class ArenaCopier:
    """One thread that copies units, one group after the other."""

    def __init__(self) -> None:
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="host-store")
        self._closing = threading.Event()

    async def copied(
        self,
        arena: memoryview,
        units: Sequence[UnitSource],
        room: Sequence[pb.ReservedUnit],
        pace: CopyPace = ALL_AT_ONCE,
    ) -> list[UnitDigest]:
        """Fills `room` from `units`, in runs as `pace` says; returns the digest of each. A
        cancelled caller waits for the unit that is being copied."""
        digests: list[UnitDigest] = []
        sources = {(unit.kind, unit.page_index): unit for unit in units}
        sizes = [unit.num_bytes for unit in room]
        while len(digests) < len(room):
            first = len(digests)
            count = await pace.next_run(sizes, first)
            if self._closing.is_set():
                break
            await self._run(arena, sources, room[first : first + count], digests)
        return digests

    async def _run(
        self,
        arena: memoryview,
        sources: Mapping[tuple[Kind, int], UnitSource],
        room: Sequence[pb.ReservedUnit],
        digests: list[UnitDigest],
    ) -> None:
        stop = threading.Event()
        job = partial(self._copy_all, arena, sources, room, digests, stop)
        copying = asyncio.wrap_future(self._copier.submit(job))
        try:
            await asyncio.shield(copying)
        finally:
            stop.set()
            await ended(copying)

    def _copy_all(
        self,
        arena: memoryview,
        sources: Mapping[tuple[Kind, int], UnitSource],
        room: Sequence[pb.ReservedUnit],
        digests: list[UnitDigest],
        stop: threading.Event,
    ) -> None:
        for unit in room:
            if stop.is_set() or self._closing.is_set():
                return
            name = kind_from_wire(unit.kind), unit.page_index
            into = arena[unit.offset : unit.offset + unit.num_bytes]
            digests.append(UnitDigest(*name, sources[name].copy(into)))

    async def close(self) -> None:
        """Stops copying; finishes the unit that is being copied."""
        self._closing.set()
        await asyncio.to_thread(self._copier.shutdown)


def check_room(
    room: Sequence[pb.ReservedUnit], units: Sequence[UnitSource], *, arena_bytes: int
) -> None:
    """Raises Unavailable for room that was not requested, or that lies outside the arena."""
    asked = {(unit.kind, unit.page_index) for unit in units}
    for unit in room:
        name = kind_from_wire(unit.kind), unit.page_index
        if name not in asked or unit.offset + unit.num_bytes > arena_bytes:
            raise Unavailable(f"the host-cache reserved {name[0].value} {name[1]} amiss")
