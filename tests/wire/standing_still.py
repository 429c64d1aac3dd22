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

from ferryman.cache.manifest import Kind
from ferryman.handoff.values import Reservation, WantedUnit
from ferryman.wire.handoff.grpc_plane import OutgoingUnit
from ferryman.wire.handoff.nixl_agent import NixlAgent, nixl_agent
from ferryman.wire.handoff.nixl_library import HOST, MemoryRegion
from ferryman.wire.handoff.nixl_writer import FailedWrites, NixlWriter
from ferryman.wire.handoff.planes import NixlGrant

NUM_BYTES = 8 << 20
UNIT = WantedUnit(Kind.FULL, 0, 1)
RESERVATION = Reservation("res-1", 7, 1, (UNIT,), 5.0)


def region_of(memory: NDArray[np.uint8]) -> MemoryRegion:
    return MemoryRegion(int(memory.ctypes.data), NUM_BYTES)


async def send(
    writer: NixlWriter, receiver: NixlAgent, here: MemoryRegion, there: MemoryRegion
) -> str:
    grant = NixlGrant(receiver.name, receiver.metadata, HOST, (there.address,))
    content = memoryview(bytearray(NUM_BYTES))

    async def batches() -> AsyncIterator[list[OutgoingUnit]]:
        yield [OutgoingUnit(UNIT, content, here.address)]

    try:
        await writer.send(grant, RESERVATION, batches())
    except FailedWrites as error:
        return str(error)
    return "landed"


async def main() -> None:
    source, target = np.ones(NUM_BYTES, np.uint8), np.zeros(NUM_BYTES, np.uint8)
    here, there = region_of(source), region_of(target)
    with nixl_agent("writer", [here]) as ours, nixl_agent("receiver", [there]) as theirs:
        ended = [await send(NixlWriter(ours, stall_seconds=0.5), theirs, here, there)]
        with theirs.listening():
            ended.append(await send(NixlWriter(ours, stall_seconds=60.0), theirs, here, there))
    sys.stdout.write("\n".join(ended))


if __name__ == "__main__":
    asyncio.run(main())
