"""Hand-offs between slots that are reached only by copying, as on a card.

Nothing but pieces of at most a frame is copied by the event loop: whole slots are read beside it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from tests.harness.pair import (
    WorkerPair,
    expected,
    fake_engine,
    pair_of_engines,
    request,
)
from tests.planes import plane_of

from ferryman.cache.manifest import Kind
from ferryman.cache.slots import SlotPart
from ferryman.engine.memory.pinned_pieces import TakePiece
from ferryman.engine.memory.slabs import ShardedSlab, SlabAddress
from ferryman.engine.memory.transfer import Transfer
from ferryman.settings.workers import NixlSettings
from ferryman.wire.handoff.nixl_library import MemoryRegion, has_nixl
from ferryman.wire.plane_values import PlaneChoice, RankSlabs
from ferryman.worker.planes import NixlSide, plane_side, rank_slabs

PROMPT = [3] * 21
with_nixl = pytest.mark.skipif(not has_nixl(), reason="ferryman[nixl] is not installed")


class TransferByCopies:
    """Slots of a host, which may not be read on an event loop, and are copied when they are."""

    is_in_place = False

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self.write = transfer.write
        self.store_unit, self.load_unit = transfer.store_unit, transfer.load_unit
        self.num_read = self.num_hashed = 0

    def read(self, kind: Kind, slot: int) -> memoryview:
        raise AssertionError("nothing of a hand-off takes memory of a slot's size")

    def read_parts(self, parts: Sequence[SlotPart], take: TakePiece) -> None:
        check_no_loop()
        self.num_read += len(parts)
        self._transfer.read_parts(parts, take)

    def digest(self, kind: Kind, slot: int) -> bytes:
        check_no_loop()
        self.num_hashed += 1
        return self._transfer.digest(kind, slot)


def check_no_loop() -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        asyncio.get_running_loop()


@asynccontextmanager
async def pair_by_copies(planes: PlaneChoice) -> AsyncIterator[WorkerPair]:
    with fake_engine() as first, fake_engine() as second:
        prefill, decode = (
            replace(engine, transfer=TransferByCopies(engine.transfer))
            for engine in (first, second)
        )
        async with pair_of_engines(prefill, decode, planes) as pair:
            yield pair


@pytest.mark.parametrize("planes", ["grpc", "auto", pytest.param("nixl-unlocked", marks=with_nixl)])
async def test_whole_slots_are_read_beside_the_event_loop(planes: PlaneChoice) -> None:
    asked = request("r1", PROMPT)
    async with pair_by_copies(planes) as pair:
        async with asyncio.timeout(120):
            await pair.run_prefill(pair.order(asked))
            tokens, _ = await pair.read_tokens("r1")
        (handed_off,) = pair.prefill.facts("handed_off")
    assert tokens == expected(asked)
    assert handed_off["path"] == plane_of(planes)
    sent, arrived = pair.prefill.engine.transfer, pair.decode.engine.transfer
    assert isinstance(sent, TransferByCopies)
    assert isinstance(arrived, TransferByCopies)
    # NIXL reads the slots itself.
    assert (sent.num_read > 0) == (plane_of(planes) != "nixl")
    # Bytes that come by gRPC are hashed on their way: they need not come back from a card.
    assert (arrived.num_hashed > 0) == (plane_of(planes) == "nixl")


@with_nixl
def test_slabs_on_a_card_are_handed_off_by_nixl_where_it_was_asked_for() -> None:
    slabs = SlabAddress(1 << 20, 640, 64, 3), SlabAddress(1 << 30, 640, 64, 4)
    places = {Kind.FULL: ShardedSlab(slabs)}
    hosts = ("127.0.0.1", "127.0.0.1")
    side = plane_side("nixl-unlocked-or-grpc", places, hosts, NixlSettings(), {})
    assert isinstance(side, NixlSide)
    assert side.regions == [MemoryRegion(1 << 20, 640, 3), MemoryRegion(1 << 30, 640, 4)]
    assert rank_slabs(places) == RankSlabs((3, 4), {Kind.FULL: (1 << 20, 1 << 30)})
