"""Rows 16 and 17: what comes back from the host is, bit for bit, what went there."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.harness.schedule import PAGE

from ferryman.cache.manifest import Kind, SectionSpec, StateManifest, lay_out
from ferryman.cache.units import HostUnit
from ferryman.engine.memory.copy_stream import CopyStream, HostSide
from ferryman.engine.memory.loads import LoadQueue
from ferryman.engine.memory.slabs import Slabs
from ferryman.engine.memory.transfer import DeviceTransfer, Transfer, transfer_of
from ferryman.schedule.batch import SlotLoad

LARGE = StateManifest(
    "large",
    PAGE,
    PAGE,
    6,
    tuple(
        lay_out(kind, [SectionSpec("state", 0, (shape,), "float32", shard_axis=0)])
        for kind, shape in ((Kind.FULL, 1_001), (Kind.WINDOW, 131_073), (Kind.RECURRENT, 400_003))
    ),
)


def on_host() -> Transfer:
    return transfer_of(Slabs.allocate(LARGE, dict.fromkeys(Kind, 3), "cpu"), HostSide(), HostSide())


def by_staging() -> Transfer:
    """As on a card, whose slots are reached only by copying."""
    return DeviceTransfer(
        Slabs.allocate(LARGE, dict.fromkeys(Kind, 3), "cpu"), HostSide(), HostSide()
    )


@pytest.mark.parametrize("make", [on_host, by_staging])
def test_rows_16_17_units_of_every_kind_come_back_bit_for_bit(
    make: Callable[[], Transfer],
) -> None:
    """Random bits, so that every NaN and every denormal is among them; sizes off every grid."""
    writer, reader = make(), make()
    fresh = {kind: bytes(reader.read(kind, 1)) for kind in LARGE.kinds}
    random = np.random.default_rng(3)
    arena, loads, written = bytearray(), [], {}
    for kind in LARGE.kinds:
        content = random.bytes(LARGE.layout(kind).slot_bytes)
        writer.write(kind, 1, 0, content)
        room = bytearray(len(content))
        digest = writer.store_unit(kind, 1, memoryview(room))
        unit = HostUnit(kind, 0, bytes(16), len(arena), len(content), digest)
        loads.append(SlotLoad("r0", unit, 2))
        written[kind] = content
        arena += room
    with CopyStream() as copies:
        tier = LoadQueue(reader, copies)
        tier.attach(memoryview(arena))
        tier.begin(0, loads)
        loaded = tier.arrived(0, loads)
    assert (loaded.corrupt, loaded.num_bytes) == ((), len(arena))
    for kind, content in written.items():
        assert bytes(reader.read(kind, 2)) == content
        assert bytes(reader.read(kind, 1)) == fresh[kind], "and the slot beside it is as it was"
