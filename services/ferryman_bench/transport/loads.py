"""Loads from the host arena against a memcpy of the same bytes, in one run.

The loads are a prompt's resume set. They use the copy stream and the tier of the workers, digests
included. The memcpy goes from the same places in the arena to the same slots.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.resume import resume_set
from ferryman.cache.units import HostUnit
from ferryman.engine.memory.copy_stream import CopyStream
from ferryman.engine.memory.loads import LoadQueue
from ferryman.engine.memory.slabs import Slabs
from ferryman.engine.memory.transfer import HostTransfer, digest_of
from ferryman.schedule.batch import SlotLoad
from ferryman_bench.timer import Timing, time_in_turn


@dataclass(frozen=True, slots=True)
class LoadBandwidth:
    """The times to load `num_bytes` in `num_units` into slots, and to copy them with memcpy."""

    num_units: int
    num_bytes: int
    loads: Timing
    memcpy: Timing

    @property
    def share(self) -> float:
        """The bandwidth of the loads as a share of memcpy's; best runs of both."""
        return self.memcpy.least / self.loads.least


def load_bandwidth(manifest: StateManifest, position: int, repeats: int = 20) -> LoadBandwidth:
    """Times the loads of resume_set(position), a multiple of the page size."""
    slots = _slots(manifest, position)
    num_slots = {kind: max(slot for k, slot in slots if k is kind) + 1 for kind in manifest.kinds}
    slabs = Slabs.allocate(manifest, num_slots, "cpu")
    arena, loads = _stored(manifest, slots)
    with CopyStream() as copies:
        tier = LoadQueue(HostTransfer(slabs), copies)
        tier.attach(arena)
        step_ids = count()

        def load() -> None:
            step_id = next(step_ids)
            tier.begin(step_id, loads)
            if tier.arrived(step_id, loads).corrupt:
                raise AssertionError("what was stored comes back")

        def copy() -> None:
            for one in loads:
                unit = one.unit
                target = np.frombuffer(slabs.bytes_of(unit.kind, one.dst), np.uint8)
                source = arena[unit.offset : unit.offset + unit.num_bytes]
                np.copyto(target, np.frombuffer(source, np.uint8))

        found = time_in_turn({"loads": load, "memcpy": copy}, repeats)
    num_bytes = sum(one.unit.num_bytes for one in loads)
    return LoadBandwidth(len(loads), num_bytes, found["loads"], found["memcpy"])


def _slots(manifest: StateManifest, position: int) -> list[tuple[Kind, int]]:
    """One slot for each unit that resuming at `position` needs."""
    needs = resume_set(manifest, position)
    return [
        *((Kind.FULL, slot) for slot in range(needs.full.num_pages)),
        *((Kind.WINDOW, slot) for slot in range(needs.window.num_pages)),
        *([(Kind.RECURRENT, 0)] if needs.needs_snapshot else []),
    ]


def _stored(
    manifest: StateManifest, slots: Sequence[tuple[Kind, int]]
) -> tuple[memoryview, tuple[SlotLoad, ...]]:
    """Loads of random bytes for every slot, and their arena: shared memory like a host-cache's."""
    sizes = [manifest.layout(kind).slot_bytes for kind, _ in slots]
    arena = memoryview(mmap.mmap(-1, sum(sizes)))
    np.frombuffer(arena, np.uint8)[:] = np.frombuffer(
        np.random.default_rng(0).bytes(len(arena)), np.uint8
    )
    loads, offset = [], 0
    for (kind, slot), num_bytes in zip(slots, sizes, strict=True):
        digest = digest_of(arena[offset : offset + num_bytes])
        loads.append(
            SlotLoad("bench", HostUnit(kind, slot, bytes(16), offset, num_bytes, digest), slot)
        )
        offset += num_bytes
    return arena, tuple(loads)
