"""Units from prefill to decode by NIXL: written to their slots, then verified there.

    writer      units as they become ready → runs by rank → write | digest → UnitsLanded → Sent
    receiver    UnitsLanded → digests of the bytes there; the rest with Commit

Decode cannot refuse such a write. The writer ends only when all its writes have ended, even after
an error or a cancel, so that its report "nothing more will be written" is true.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from ferryman.cache.rank_runs import RankShares
from ferryman.errors import FerrymanError, Unavailable, Unreachable
from ferryman.handoff.effects import WriteFence, fence_of
from ferryman.handoff.values import PageRange, Reservation, UnitDigest, UnitName, ranges_of
from ferryman.wire.codec.handoff import range_from_wire, range_to_wire
from ferryman.wire.handoff.grpc_plane import Sent
from ferryman.wire.handoff.nixl_agent import NixlAgent
from ferryman.wire.handoff.nixl_library import RunTable, merged_runs
from ferryman.wire.handoff.outgoing_units import AnyUnit
from ferryman.wire.handoff.slot_runs import SlotRuns
from ferryman.wire.plane_values import NIXL, NixlGrant, RankSlabs
from ferryman.wire.v1 import decode_pb2

# A post costs as much as writing some 100 KiB: on two cores parts of 4 MiB reached 0.44 of a raw
# write of 64 MiB, parts of 16 MiB 0.67, one part 0.79.
PART_BYTES = 64 << 20
# As long as a lease, and longer than a part takes on any useful network.
STALL_SECONDS = 5.0
SLOW_BYTES_PER_SECOND = 16e6
_FIRST = asyncio.FIRST_COMPLETED


class FailedWrites(Unreachable):
    """Writes ended, and it is not known whether they landed, or still will."""

    @property
    def reason(self) -> str:
        """Its reason for other processes: the receiver could not be reached."""
        return Unreachable.__name__


class NotMet(Unavailable):
    """The receiver's agent is out of reach; nothing was written, and no unit was taken."""


class GrantMisfit(NotMet):
    """The receiver's ranks are not cut as this side computes; nothing was written."""


class NixlWriter:
    """The writing agent of a process, and the peers it knows.

    It reads slots in place, in `slabs`, and cuts them for the receiver by `shares`.

    A connection on which nothing lands for `stall_seconds`, or longer if parts are large, is
    ended: a lost interface or a stopped peer would otherwise be silent for many minutes.
    """

    def __init__(
        self,
        agent: NixlAgent,
        slabs: RankSlabs,
        shares: RankShares,
        *,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        self._agent, self._stall_seconds = agent, stall_seconds
        self._slabs, self._shares = slabs, shares
        self._digester = ThreadPoolExecutor(1, thread_name_prefix="nixl-digest")
        self._peers: dict[str, str] = {}

    async def send(
        self,
        grant: NixlGrant,
        reservation: Reservation,
        batches: AsyncIterator[Sequence[AnyUnit]],
    ) -> Sent:
        """Writes units as they come; returns when all have landed.

        Raises NotMet before any write, FailedWrites when some failed or stalled. Other errors leave
        only after the last write has ended. Cancel it at most once.
        """
        runs = self._runs_to(grant)
        peer = await self._peer(grant)
        slots = {
            unit.name: slot for unit, slot in zip(reservation.wanted, grant.slots, strict=True)
        }
        target = _Target(peer, fence_of(reservation), slots)
        sending = _Sending(self._agent, target, runs, self._digester)
        try:
            async for batch in batches:
                sending.write(batch)
            await sending.all_landed(self._stall_seconds)
        except BaseException:
            await self._settle(sending, grant)
            raise
        return sending.sent()

    async def _settle(self, sending: _Sending, grant: NixlGrant) -> None:
        """Waits until no write is running. Raises FailedWrites unless all have landed."""
        try:
            await sending.all_landed(self._stall_seconds)
        except FailedWrites:
            await self._forget(grant)  # this ends them
            await sending.ended()
            raise

    def _runs_to(self, grant: NixlGrant) -> SlotRuns:
        """Raises GrantMisfit unless the receiver's ranks keep what this side computes for them."""
        num_ranks = grant.slabs.num_ranks
        try:
            layout = self._shares.of(num_ranks).digest
            runs = SlotRuns(self._slabs, grant.slabs, self._shares)
        except (ValueError, FerrymanError) as error:
            raise GrantMisfit(f"no unit can be cut for {num_ranks} ranks: {error}") from error
        if layout != grant.layout_digest:
            text = f"{num_ranks} ranks keep {layout} here, {grant.layout_digest} there"
            raise GrantMisfit(text)
        return runs

    async def _peer(self, grant: NixlGrant) -> str:
        if grant.agent not in self._peers:
            try:
                self._peers[grant.agent] = await self._agent.add_peer(grant.metadata)
            except FerrymanError as error:
                raise NotMet(f"the agent {grant.agent} cannot be written to: {error}") from error
        return self._peers[grant.agent]

    async def _forget(self, grant: NixlGrant) -> None:
        """Ends a connection that failed; a new one is made from the receiver's next agent."""
        peer = self._peers.pop(grant.agent, "")
        if peer:
            try:
                await self._agent.remove_peer(peer)
            except Unavailable:
                return


@dataclass(frozen=True, slots=True)
class _Target:
    """One reservation at a peer, and the slot there of each wanted unit."""

    peer: str
    fence: WriteFence
    slots: Mapping[UnitName, int]


class _Sending:
    """One reservation's writes."""

    def __init__(
        self, agent: NixlAgent, target: _Target, runs: SlotRuns, digester: Executor
    ) -> None:
        self._agent, self._target = agent, target
        self._runs, self._digester = runs, digester
        self._writes: list[asyncio.Future[None]] = []
        self._is_stalled = False
        self._largest_bytes = 0
        self._digests: list[asyncio.Future[list[UnitDigest]]] = []
        self._num_bytes = 0

    def write(self, batch: Sequence[AnyUnit]) -> None:
        for units in _parts(batch):
            writing = self._agent.write(self._target.peer, self._runs_of(units))
            landed = asyncio.wrap_future(writing)
            self._digests.append(asyncio.wrap_future(self._digester.submit(_digests_of, units)))
            landed.add_done_callback(partial(self._tell, units))
            self._writes.append(landed)
            num_bytes = sum(unit.num_bytes for unit in units)
            self._num_bytes += num_bytes
            self._largest_bytes = max(self._largest_bytes, num_bytes)

    def _runs_of(self, units: Sequence[AnyUnit]) -> RunTable:
        tables = []
        for kind, same_kind in groupby(units, key=lambda unit: unit.unit.kind):
            pairs = [(unit.slot, self._target.slots[unit.unit.name]) for unit in same_kind]
            here, there = zip(*pairs, strict=True)
            tables.append(self._runs.between(kind, here, there))
        return merged_runs(np.concatenate(tables))

    def _tell(self, units: Sequence[AnyUnit], landed: asyncio.Future[None]) -> None:
        """Reports these units to decode, which may verify them while others are being written."""
        if landed.exception() is None:
            ranges = ranges_of(unit.unit.name for unit in units)
            self._agent.tell(self._target.peer, landed_to_bytes(self._target.fence, ranges))

    async def all_landed(self, stall_seconds: float) -> None:
        """Raises FailedWrites when a write failed, or none ended for so long."""
        left = self._under_way()
        patience = stall_seconds + self._largest_bytes / SLOW_BYTES_PER_SECOND
        while left and not self._is_stalled:
            ended, left = await asyncio.wait(left, timeout=patience, return_when=_FIRST)
            self._is_stalled = not ended
        if self._is_stalled:
            raise FailedWrites(f"no NIXL write ended for {patience:.1f} s")
        if any(landed.exception() for landed in self._writes):
            raise FailedWrites("a NIXL write did not end well")

    async def ended(self) -> None:
        """Waits until no write is running, with any result."""
        if self._writes:
            await asyncio.wait(self._under_way())

    def _under_way(self) -> set[asyncio.Future[Any]]:
        return {*self._writes, *self._digests}

    def sent(self) -> Sent:
        digests = tuple(digest for part in self._digests for digest in part.result())
        return Sent(digests, self._num_bytes, NIXL)


def _parts(batch: Sequence[AnyUnit]) -> Iterator[tuple[AnyUnit, ...]]:
    """Consecutive units of about PART_BYTES together; a unit is never divided."""
    part: list[AnyUnit] = []
    num_bytes = 0
    for unit in batch:
        part.append(unit)
        num_bytes += unit.num_bytes
        if num_bytes >= PART_BYTES:
            yield tuple(part)
            part, num_bytes = [], 0
    if part:
        yield tuple(part)


def _digests_of(units: Sequence[AnyUnit]) -> list[UnitDigest]:
    return [UnitDigest(unit.unit.kind, unit.unit.index, unit.digest()) for unit in units]


def landed_to_bytes(fence: WriteFence, units: Sequence[PageRange]) -> bytes:
    return decode_pb2.UnitsLanded(
        reservation_id=fence.reservation_id,
        epoch=fence.epoch,
        attempt=fence.attempt,
        units=[range_to_wire(span) for span in units],
    ).SerializeToString()


def landed_from_bytes(message: bytes) -> tuple[WriteFence, tuple[PageRange, ...]]:
    """Raises ValueError or InvalidRequest for bytes that are not such a message."""
    parsed = decode_pb2.UnitsLanded()
    try:
        parsed.ParseFromString(message)
    except DecodeError as error:
        raise ValueError("no UnitsLanded") from error
    fence = WriteFence(parsed.epoch, parsed.reservation_id, parsed.attempt)
    return fence, tuple(range_from_wire(span) for span in parsed.units)
