"""Units of every kind of state, from the slabs of several ranks into those of several ranks.

A twin of the receiver, which gets the same bytes by copying, says what must lie at each rank.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from ferryman.cache.manifest import Kind, SectionSpec, StateManifest, lay_out
from ferryman.cache.rank_runs import RankShares
from ferryman.cache.shards import reshard
from ferryman.engine.memory.slabs import Slabs, places_of
from ferryman.engine.tensor_parallel.shared_slabs import ShardedTransfer
from ferryman.handoff.values import Reservation, UnitDigest, WantedUnit
from ferryman.wire.handoff.nixl_agent import NixlAgent, nixl_agent
from ferryman.wire.handoff.nixl_library import has_nixl
from ferryman.wire.handoff.nixl_writer import GrantMisfit, NixlWriter
from ferryman.wire.handoff.outgoing_units import OutgoingUnit
from ferryman.wire.plane_values import NixlGrant, RankSlabs
from ferryman.worker.planes import NixlSide, rank_slabs

pytestmark = pytest.mark.skipif(not has_nixl(), reason="ferryman[nixl] is not installed")

NUM_SLOTS = 5
# Neighbours on both sides, neighbours here alone, and one by itself.
PAIRS = ((0, 2), (1, 3), (2, 0), (4, 4))


def share_of(num_ranks: int) -> StateManifest:
    """Pages, window and recurrent state with gaps between sections: heads as many as the most
    ranks, fewer heads than ranks, and state that every rank keeps."""
    if 4 % num_ranks:
        raise ValueError(f"{num_ranks} ranks do not divide 4 heads")
    own, shared = 4 // num_ranks, max(1, 2 // num_ranks)
    specs: dict[Kind, list[tuple[str, tuple[int, ...], int | None]]] = {
        Kind.FULL: [("key", (own, 3, 5), 0), ("latent", (7,), None), ("value", (own, 3, 5), 0)],
        Kind.WINDOW: [("key", (shared, 3, 2), 0), ("index", (3, shared, 5), 1)],
        Kind.RECURRENT: [("conv", (own, 3), 0), ("group", (9,), None), ("state", (own, 4, 3), 0)],
    }
    layouts = tuple(
        lay_out(kind, [SectionSpec(name, 0, shape, "bfloat16", axis) for name, shape, axis in each])
        for kind, each in specs.items()
    )
    return StateManifest("every kind", 4, 4, 4, layouts)


WHOLE = share_of(1)
WANTED = tuple(WantedUnit(kind, index, 1) for kind in Kind for index, _ in enumerate(PAIRS))
RESERVATION = Reservation("res-1", 7, 1, WANTED, 5.0)


class RankMemory:
    """The slabs of one worker's ranks, poisoned."""

    def __init__(self, num_ranks: int) -> None:
        self.shares = RankShares(WHOLE, num_ranks, share_of)
        share = self.shares.of(num_ranks)
        sizes = dict.fromkeys(Kind, NUM_SLOTS)
        self.tensors = [Slabs.allocate(share, sizes, "cpu").tensors for _ in range(num_ranks)]
        plans = {k: reshard(WHOLE.layout(k), share.layout(k), num_ranks) for k in Kind}
        self.transfer = ShardedTransfer(plans, self.tensors)
        self.side = NixlSide(places_of(self.tensors))
        self.slabs = rank_slabs(self.side.places)

    @property
    def content(self) -> list[dict[Kind, bytes]]:
        """All bytes of every rank."""
        return [{k: slab.numpy().tobytes() for k, slab in rank.items()} for rank in self.tensors]


def random_unit(kind: Kind, rng: np.random.Generator) -> bytes:
    layout = WHOLE.layout(kind)
    slot = np.zeros(layout.slot_bytes, np.uint8)
    for section in layout.sections:
        content = rng.integers(0, 256, section.num_bytes, dtype=np.uint8)
        slot[section.offset : section.offset + section.num_bytes] = content
    return slot.tobytes()


def filled(here: RankMemory, twin: RankMemory) -> list[OutgoingUnit]:
    """Puts the same random units into the writer's slots and the twin's."""
    rng, units = np.random.default_rng(5), []
    for unit in WANTED:
        source, target = PAIRS[unit.index]
        content = random_unit(unit.kind, rng)
        here.transfer.write(unit.kind, source, 0, content)
        twin.transfer.write(unit.kind, target, 0, content)
        units.append(OutgoingUnit(unit, here.transfer.read(unit.kind, source), source))
    return units


def grant_of(there: RankMemory, receiver: NixlAgent) -> NixlGrant:
    slots = tuple(PAIRS[unit.index][1] for unit in WANTED)
    return NixlGrant(receiver.name, receiver.metadata, there.slabs, slots, there.shares.digest)


async def in_batches(units: list[OutgoingUnit]) -> AsyncIterator[list[OutgoingUnit]]:
    yield units[:3]
    yield units[3:]


@contextmanager
def agents(here: RankMemory, there: RankMemory) -> Iterator[tuple[NixlAgent, NixlAgent]]:
    with (
        nixl_agent("writer", here.side.regions) as writer,
        nixl_agent("receiver", there.side.regions) as receiver,
    ):
        yield writer, receiver


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(pair, id=f"{pair[0]} to {pair[1]}")
        for pair in ((1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 2), (4, 4))
    ],
)
async def test_every_rank_has_its_share_and_no_other_byte_has_changed(
    ranks: tuple[int, int],
) -> None:
    here, there, twin = RankMemory(ranks[0]), RankMemory(ranks[1]), RankMemory(ranks[1])
    units = filled(here, twin)
    with agents(here, there) as (writer, receiver), receiver.listening():
        async with asyncio.timeout(120):
            sent = await NixlWriter(writer, here.slabs, here.shares).send(
                grant_of(there, receiver), RESERVATION, in_batches(units)
            )
    assert there.content == twin.content
    assert sent.num_bytes == sum(len(unit.content) for unit in units)
    assert sent.digests == tuple(
        UnitDigest(*unit.name, there.transfer.digest(unit.kind, PAIRS[unit.index][1]))
        for unit in WANTED
    )


@pytest.mark.parametrize("forged", ["ranks that cannot share it", "other ranks", "layout"])
async def test_a_grant_that_does_not_fit_is_refused_before_the_first_write(forged: str) -> None:
    here, there, twin = RankMemory(2), RankMemory(2), RankMemory(2)
    units, before = filled(here, twin), there.content
    with agents(here, there) as (writer, receiver):
        grant = grant_of(there, receiver)
        num_ranks = {"ranks that cannot share it": 3, "other ranks": 4}.get(forged, 2)
        addresses = {k: (each * 2)[:num_ranks] for k, each in grant.slabs.addresses.items()}
        slabs = RankSlabs((-1,) * num_ranks, addresses)
        grant = replace(grant, slabs=slabs)
        if forged == "layout":
            grant = replace(grant, layout_digest=WHOLE.digest)
        with pytest.raises(GrantMisfit, match=f"{num_ranks} ranks"):
            await NixlWriter(writer, here.slabs, here.shares).send(
                grant, RESERVATION, in_batches(units)
            )
    assert there.content == before
