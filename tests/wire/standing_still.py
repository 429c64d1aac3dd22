"""Two agents joined by TCP alone, the receiver of which never looks: a write to it stands still.

Prints what became of the send and of the next one, when the receiver looks again. A process of its
own, for UCX reads its settings once.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import numpy as np
from numpy.typing import NDArray

from ferryman.cache.manifest import Kind, SectionSpec, StateManifest, lay_out
from ferryman.cache.rank_runs import RankShares
from ferryman.handoff.values import Reservation, WantedUnit
from ferryman.wire.handoff.nixl_agent import NixlAgent, nixl_agent
from ferryman.wire.handoff.nixl_library import HOST, MemoryRegion
from ferryman.wire.handoff.nixl_writer import FailedWrites, NixlWriter
from ferryman.wire.handoff.outgoing_units import OutgoingUnit
from ferryman.wire.plane_values import NixlGrant, RankSlabs

NUM_BYTES = 8 << 20
UNIT = WantedUnit(Kind.FULL, 0, 1)
LAYOUT = lay_out(Kind.FULL, [SectionSpec("unit", 0, (NUM_BYTES // 4,), "float32", None)])
SHARES = RankShares.undivided(StateManifest("still", 1, 1, 0, (LAYOUT,)))
RESERVATION = Reservation("res-1", 7, 1, (UNIT,), 5.0)


def region_of(memory: NDArray[np.uint8]) -> MemoryRegion:
    return MemoryRegion(int(memory.ctypes.data), NUM_BYTES)


def slabs_in(region: MemoryRegion) -> RankSlabs:
    return RankSlabs((HOST,), {Kind.FULL: (region.address,)})


async def send(writer: NixlWriter, receiver: NixlAgent, there: MemoryRegion) -> str:
    slabs = slabs_in(there)
    grant = NixlGrant(receiver.name, receiver.metadata, slabs, (0,), SHARES.digest)
    content = memoryview(bytearray(NUM_BYTES))

    async def batches() -> AsyncIterator[list[OutgoingUnit]]:
        yield [OutgoingUnit(UNIT, content)]

    try:
        await writer.send(grant, RESERVATION, batches())
    except FailedWrites as error:
        return str(error)
    return "landed"


async def main() -> None:
    source, target = np.ones(NUM_BYTES, np.uint8), np.zeros(NUM_BYTES, np.uint8)
    here, there = region_of(source), region_of(target)
    with nixl_agent("writer", [here]) as ours, nixl_agent("receiver", [there]) as theirs:
        impatient, patient = (
            NixlWriter(ours, slabs_in(here), SHARES, stall_seconds=seconds)
            for seconds in (0.5, 60.0)
        )
        ended = [await send(impatient, theirs, there)]
        with theirs.listening():
            ended.append(await send(patient, theirs, there))
    sys.stdout.write("\n".join(ended))


if __name__ == "__main__":
    asyncio.run(main())
