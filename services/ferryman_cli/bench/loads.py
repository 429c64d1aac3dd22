"""Loads from the host arena against a memcpy of the same bytes, in one run.

The loads are a prompt's resume set, through the copy stream and the tier that workers use, digests
and all. The memcpy goes from the same places in the arena to the same slots.
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
from ferryman.engine.copy_stream import CopyStream
from ferryman.engine.loads import HostTier
from ferryman.engine.slabs import Slabs
from ferryman.engine.transfer import HostTransfer, digest_of
from ferryman.schedule.batch import Load
from ferryman_cli.bench.timing import Timing, time_in_turn


@dataclass(frozen=True, slots=True)
class LoadBandwidth:
    """How long it took to bring `num_bytes` in `num_units` into slots, and merely to copy them."""

    num_units: int
    num_bytes: int
    loads: Timing
    memcpy: Timing

    @property
    def share(self) -> float:
        """Of what memcpy does with the same bytes; best against best."""
        return self.memcpy.least / self.loads.least


def load_bandwidth(manifest: StateManifest, position: int, repeats: int = 20) -> LoadBandwidth:
    """Times the loads of resume_set(position), a multiple of the page size."""
    slots = _slots(manifest, position)
    num_slots = {kind: max(slot for k, slot in slots if k is kind) + 1 for kind in manifest.kinds}
    slabs = Slabs.allocate(manifest, num_slots, "cpu")
    arena, loads = _stored(manifest, slots)
    with CopyStream() as copies:
        tier = HostTier(HostTransfer(slabs), copies)
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
    """A slot of its own for everything that resuming at `position` needs."""
    needs = resume_set(manifest, position)
    return [
        *((Kind.FULL, slot) for slot in range(needs.full.num_pages)),
        *((Kind.WINDOW, slot) for slot in range(needs.window.num_pages)),
        *([(Kind.RECURRENT, 0)] if needs.needs_snapshot else []),
    ]


def _stored(
    manifest: StateManifest, slots: Sequence[tuple[Kind, int]]
) -> tuple[memoryview, tuple[Load, ...]]:
    """Random bytes for every slot, in shared memory as the host-cache's arena is."""
    sizes = [manifest.layout(kind).slot_bytes for kind, _ in slots]
    arena = memoryview(mmap.mmap(-1, sum(sizes)))
    np.frombuffer(arena, np.uint8)[:] = np.frombuffer(
        np.random.default_rng(0).bytes(len(arena)), np.uint8
    )
    loads, offset = [], 0
    for (kind, slot), num_bytes in zip(slots, sizes, strict=True):
        digest = digest_of(arena[offset : offset + num_bytes])
        loads.append(
            Load("bench", HostUnit(kind, slot, bytes(16), offset, num_bytes, digest), slot)
        )
        offset += num_bytes
    return arena, tuple(loads)
