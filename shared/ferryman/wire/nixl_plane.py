"""Units from prefill to decode by NIXL: written where they shall lie, examined when they have.

    writer      units as they become ready → runs → write | digest → UnitsLanded → Sent
    receiver    UnitsLanded → digests of what lies there; the rest with Commit

Decode cannot refuse such a write. The writer ends only when every write of it has ended, whatever
became of it meanwhile, so that its word "nothing more will be written" is worth its name.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any

import xxhash
from google.protobuf.message import DecodeError

from ferryman.errors import FerrymanError, Unavailable
from ferryman.handoff.effects import Fence
from ferryman.handoff.values import PageRange, Reservation, UnitDigest, UnitName, ranges_of
from ferryman.wire.codec.handoff import range_from_wire, range_to_wire
from ferryman.wire.data_plane import OutgoingUnit, Sent
from ferryman.wire.nixl_agent import NixlAgent, Run, merged_runs
from ferryman.wire.planes import NIXL, NixlGrant
from ferryman.wire.v1 import decode_pb2

# A post costs as much as writing some 100 KiB: on two cores parts of 4 MiB reached 0.44 of a raw
# write of 64 MiB, parts of 16 MiB 0.67, one part 0.79.
PART_BYTES = 64 << 20
# As long as a lease, and what a part takes on the slowest network that is worth the name.
STALL_SECONDS = 5.0
SLOW_BYTES_PER_SECOND = 16e6
_FIRST = asyncio.FIRST_COMPLETED


class FailedWrites(Unavailable):
    """Writes ended without it being known whether they landed, or still will."""


class NotMet(Unavailable):
    """The receiver's agent is out of reach; nothing was written, and no unit was asked for."""


class NixlWriter:
    """The writing agent of a process, and the peers it knows.

    A connection on which nothing lands for `stall_seconds`, or longer where parts are large, is
    ended: an interface that went away, or a peer that stands still, says nothing for many minutes.
    """

    def __init__(self, agent: NixlAgent, *, stall_seconds: float = STALL_SECONDS) -> None:
        self._agent, self._stall_seconds = agent, stall_seconds
        self._digester = ThreadPoolExecutor(1, thread_name_prefix="nixl-digest")
        self._peers: dict[str, str] = {}

    async def send(
        self,
        grant: NixlGrant,
        reservation: Reservation,
        batches: AsyncIterator[Sequence[OutgoingUnit]],
    ) -> Sent:
        """Writes units as they come; returns when all have landed.

        Raises NotMet before anything, FailedWrites when some ended badly or stood still, and
        whatever else ended it only after the last write has ended. To be cancelled at most once.
        """
        peer = await self._peer(grant)
        sending = _Sending(self._agent, peer, grant, reservation, self._digester)
        try:
            async for batch in batches:
                sending.write(batch)
            await sending.all_landed(self._stall_seconds)
        except BaseException:
            await self._settle(sending, grant)
            raise
        return sending.sent()

    async def _settle(self, sending: _Sending, grant: NixlGrant) -> None:
        """Until no write is under way. Raises FailedWrites unless all have landed."""
        try:
            await sending.all_landed(self._stall_seconds)
        except FailedWrites:
            await self._forget(grant)  # which ends them
            await sending.ended()
            raise

    async def _peer(self, grant: NixlGrant) -> str:
        if grant.agent not in self._peers:
            try:
                self._peers[grant.agent] = await self._agent.add_peer(grant.metadata)
            except FerrymanError as error:
                raise NotMet(f"the agent {grant.agent} cannot be written to: {error}") from error
        return self._peers[grant.agent]

    async def _forget(self, grant: NixlGrant) -> None:
        """A connection that failed is made anew, from the receiver's next agent."""
        peer = self._peers.pop(grant.agent, "")
        if peer:
            try:
                await self._agent.remove_peer(peer)
            except Unavailable:
                return


class _Sending:
    """One reservation's writes."""

    def __init__(
        self,
        agent: NixlAgent,
        peer: str,
        grant: NixlGrant,
        reservation: Reservation,
        digester: Executor,
    ) -> None:
        self._agent, self._peer, self._device = agent, peer, grant.device
        self._reservation, self._digester = reservation, digester
        names = (unit.name for unit in reservation.wanted)
        self._remote: dict[UnitName, int] = dict(zip(names, grant.addresses, strict=True))
        self._writes: list[asyncio.Future[None]] = []
        self._is_stalled = False
        self._largest_bytes = 0
        self._digests: list[asyncio.Future[list[UnitDigest]]] = []
        self._num_bytes = 0

    def write(self, batch: Sequence[OutgoingUnit]) -> None:
        for units in _parts(batch):
            runs = merged_runs(
                Run(unit.address, self._remote[unit.unit.name], len(unit.content)) for unit in units
            )
            landed = asyncio.wrap_future(self._agent.write(self._peer, runs, self._device))
            self._digests.append(asyncio.wrap_future(self._digester.submit(_digests_of, units)))
            landed.add_done_callback(partial(self._tell, units))
            self._writes.append(landed)
            num_bytes = sum(run.num_bytes for run in runs)
            self._num_bytes += num_bytes
            self._largest_bytes = max(self._largest_bytes, num_bytes)

    def _tell(self, units: Sequence[OutgoingUnit], landed: asyncio.Future[None]) -> None:
        """Decode may examine these while others are on their way."""
        if landed.exception() is None:
            ranges = ranges_of(unit.unit.name for unit in units)
            self._agent.tell(self._peer, landed_to_bytes(fence_of(self._reservation), ranges))

    async def all_landed(self, stall_seconds: float) -> None:
        """Raises FailedWrites when one ended badly, or none ended for so long."""
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
        """Waits until no write is under way, whatever became of it."""
        if self._writes:
            await asyncio.wait(self._under_way())

    def _under_way(self) -> set[asyncio.Future[Any]]:
        return {*self._writes, *self._digests}

    def sent(self) -> Sent:
        digests = tuple(digest for part in self._digests for digest in part.result())
        return Sent(digests, self._num_bytes, NIXL)


def _parts(batch: Sequence[OutgoingUnit]) -> Iterator[tuple[OutgoingUnit, ...]]:
    """Consecutive units of about PART_BYTES together; a unit is never cut."""
    part: list[OutgoingUnit] = []
    num_bytes = 0
    for unit in batch:
        part.append(unit)
        num_bytes += len(unit.content)
        if num_bytes >= PART_BYTES:
            yield tuple(part)
            part, num_bytes = [], 0
    if part:
        yield tuple(part)


def _digests_of(units: Sequence[OutgoingUnit]) -> list[UnitDigest]:
    return [
        UnitDigest(unit.unit.kind, unit.unit.index, xxhash.xxh3_128_digest(unit.content))
        for unit in units
    ]


def fence_of(reservation: Reservation) -> Fence:
    return Fence(reservation.epoch, reservation.reservation_id, reservation.attempt)


def landed_to_bytes(fence: Fence, units: Sequence[PageRange]) -> bytes:
    return decode_pb2.UnitsLanded(
        reservation_id=fence.reservation_id,
        epoch=fence.epoch,
        attempt=fence.attempt,
        units=[range_to_wire(span) for span in units],
    ).SerializeToString()


def landed_from_bytes(message: bytes) -> tuple[Fence, tuple[PageRange, ...]]:
    """Raises ValueError or InvalidRequest for bytes that are no such message."""
    parsed = decode_pb2.UnitsLanded()
    try:
        parsed.ParseFromString(message)
    except DecodeError as error:
        raise ValueError("no UnitsLanded") from error
    fence = Fence(parsed.epoch, parsed.reservation_id, parsed.attempt)
    return fence, tuple(range_from_wire(span) for span in parsed.units)
