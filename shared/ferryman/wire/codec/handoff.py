"""DecodeService: reservations, commits and aborts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ferryman.cache.rank_runs import MAX_RANKS
from ferryman.errors import InvalidRequest
from ferryman.handoff.effects import WriteFence
from ferryman.handoff.values import PageRange, Reservation, UnitDigest, WantedUnit
from ferryman.ids import check_request_id
from ferryman.wire.codec.message_table import At, Codec, Within, each, same, table
from ferryman.wire.codec.prefill import (
    prefill_order_from_wire,
    prefill_order_to_wire,
    progress_from_wire,
    progress_to_wire,
)
from ferryman.wire.codec.request import ADDRESS, CONTEXT, REQUEST, SAMPLED, SIGNATURE, USAGE
from ferryman.wire.codec.scalars import (
    KIND,
    digest_from_bytes,
    kind_from_wire,
    kind_to_wire,
    milliseconds,
    seconds,
)
from ferryman.wire.plane_values import (
    GrpcOnly,
    MemoryGrant,
    MemoryOffer,
    NixlGrant,
    NixlOffer,
    Plane,
    PlaneOffer,
    RankSlabs,
)
from ferryman.wire.v1 import decode_pb2, types_pb2
from ferryman.wire.values import (
    AbortOrder,
    CommitOrder,
    PrefillOrder,
    PrefillProgress,
    ReserveOrder,
    RouterAbort,
    WriterAbort,
)

RANGE = table(PageRange, types_pb2.PageRange, kind=KIND, first="first_page", end="end_page")
range_to_wire, range_from_wire = RANGE


# By hand: a hand-off has one for each of its units.


def digest_to_wire(digest: UnitDigest) -> types_pb2.UnitDigest:
    return types_pb2.UnitDigest(
        kind=kind_to_wire(digest.kind), page_index=digest.index, digest=digest.digest
    )


def digest_from_wire(message: types_pb2.UnitDigest) -> UnitDigest:
    digest = digest_from_bytes(message.digest)
    return UnitDigest(kind_from_wire(message.kind), message.page_index, digest)


def wanted_to_wire(wanted: Iterable[WantedUnit]) -> list[types_pb2.WantedRange]:
    """Runs of neighbouring units become one range each; their order is kept."""
    ranges: list[types_pb2.WantedRange] = []
    previous: WantedUnit | None = None
    for unit in wanted:
        if previous is None or unit.name != (previous.kind, previous.index + 1):
            kind = kind_to_wire(unit.kind)
            ranges.append(types_pb2.WantedRange(kind=kind, first_page=unit.index))
        ranges[-1].generations.append(unit.slot_generation)
        previous = unit
    return ranges


def wanted_from_wire(messages: Iterable[types_pb2.WantedRange]) -> tuple[WantedUnit, ...]:
    return tuple(
        WantedUnit(kind_from_wire(message.kind), message.first_page + nth, generation)
        for message in messages
        for nth, generation in enumerate(message.generations)
    )


OFFER = table(NixlOffer, decode_pb2.NixlOffer)
MEMORY_OFFER = table(MemoryOffer, decode_pb2.MemoryOffer)


def _offer_to_fields(offer: PlaneOffer) -> dict[str, Any]:
    match offer:
        case NixlOffer():
            return {"nixl": OFFER.to_wire(offer)}
        case MemoryOffer():
            return {"memory": MEMORY_OFFER.to_wire(offer)}
    return {}


def _offer_from_fields(message: decode_pb2.ReserveRequest) -> PlaneOffer:
    if message.HasField("nixl"):
        return OFFER.from_wire(message.nixl)
    if message.HasField("memory"):
        return MEMORY_OFFER.from_wire(message.memory)
    return GrpcOnly()


def _drawn_to_fields(token_id: int | None) -> dict[str, int]:
    return {} if token_id is None else {"drawn_token_id": token_id}


def _drawn_from_fields(message: decode_pb2.ReserveRequest) -> int | None:
    return message.drawn_token_id if message.HasField("drawn_token_id") else None


reserve_order_to_wire, reserve_order_from_wire = table(
    ReserveOrder,
    decode_pb2.ReserveRequest,
    context=CONTEXT,
    writer=ADDRESS,
    request=REQUEST,
    offer=Within(("nixl", "memory"), _offer_to_fields, _offer_from_fields),
    signature=SIGNATURE,
    drawn_token_id=Within(("drawn_token_id",), _drawn_to_fields, _drawn_from_fields),
)
# Beyond it is no address of a process; below it, sums with offsets fit a signed number.
MAX_ADDRESS = (1 << 62) - 1


def _slabs_to_fields(slabs: RankSlabs) -> dict[str, Any]:
    by_kind = [
        decode_pb2.GrantedSlab(kind=kind_to_wire(kind), addresses=addresses)
        for kind, addresses in slabs.addresses.items()
    ]
    return {"devices": slabs.devices, "slabs": by_kind}


def _slabs_from_fields(message: decode_pb2.NixlGrant) -> RankSlabs:
    """Raises InvalidRequest for ranks that cannot be, or that differ from kind to kind."""
    devices = tuple(message.devices)
    if not 1 <= len(devices) <= MAX_RANKS:
        raise InvalidRequest(f"{len(devices)} ranks are not from 1 to {MAX_RANKS}", "nixl")
    if len({device < 0 for device in devices}) > 1:
        raise InvalidRequest("ranks are all on a host or all on cards", "nixl")
    for slab in message.slabs:
        if len(slab.addresses) != len(devices):
            text = f"{len(slab.addresses)} addresses of slabs for {len(devices)} ranks"
            raise InvalidRequest(text, "nixl")
        if max(slab.addresses) > MAX_ADDRESS:
            raise InvalidRequest("no slab is at such an address", "nixl")
    addresses = {kind_from_wire(slab.kind): tuple(slab.addresses) for slab in message.slabs}
    if len(addresses) != len(message.slabs):
        raise InvalidRequest("the slabs of a kind are named twice", "nixl")
    return RankSlabs(devices, addresses)


GRANT = table(
    NixlGrant,
    decode_pb2.NixlGrant,
    slabs=Within(("devices", "slabs"), _slabs_to_fields, _slabs_from_fields),
    slots=At(same, tuple),
)
MEMORY_GRANT = table(MemoryGrant, decode_pb2.MemoryGrant)


def _plane_from_wire(message: decode_pb2.ReserveResponse, wanted: tuple[WantedUnit, ...]) -> Plane:
    """Raises InvalidRequest for a grant that does not give a place for each wanted unit."""
    if message.HasField("memory"):
        return MEMORY_GRANT.from_wire(message.memory)
    if not message.HasField("nixl"):
        return GrpcOnly()
    grant = GRANT.from_wire(message.nixl)
    if len(grant.slots) != len(wanted):
        raise InvalidRequest(f"{len(grant.slots)} slots for {len(wanted)} units", "nixl")
    for kind in {unit.kind for unit in wanted}.difference(grant.slabs.addresses):
        raise InvalidRequest(f"{kind} units are wanted, and no slab for them is named", "nixl")
    return grant


@dataclass(frozen=True, slots=True)
class ReserveAnswer:
    """A reservation, and the plane on which to write its units."""

    reservation: Reservation
    plane: Plane = field(default_factory=GrpcOnly)


def reserve_answer_to_wire(answer: ReserveAnswer) -> decode_pb2.ReserveResponse:
    return decode_pb2.ReserveResponse(
        reservation_id=answer.reservation.reservation_id,
        epoch=answer.reservation.epoch,
        wanted=wanted_to_wire(answer.reservation.wanted),
        lease_ms=milliseconds(answer.reservation.lease_seconds),
        nixl=GRANT.to_wire(answer.plane) if isinstance(answer.plane, NixlGrant) else None,
        memory=(
            MEMORY_GRANT.to_wire(answer.plane) if isinstance(answer.plane, MemoryGrant) else None
        ),
    )


def reserve_answer_from_wire(message: decode_pb2.ReserveResponse, attempt: int) -> ReserveAnswer:
    """The answer does not repeat `attempt`: the caller knows it from its request."""
    reservation = Reservation(
        reservation_id=message.reservation_id,
        epoch=message.epoch,
        attempt=attempt,
        wanted=wanted_from_wire(message.wanted),
        lease_seconds=seconds(message.lease_ms),
    )
    return ReserveAnswer(reservation, _plane_from_wire(message, reservation.wanted))


def _commit_from_wire(message: decode_pb2.CommitRequest) -> CommitOrder:
    if not message.HasField("first"):
        raise InvalidRequest("a commit carries the first token", "first")
    return _COMMIT.from_wire(message)


_COMMIT = table(
    CommitOrder,
    decode_pb2.CommitRequest,
    context=CONTEXT,
    written=each(RANGE),
    digests=each(Codec(digest_to_wire, digest_from_wire)),
    first=SAMPLED,
    usage=USAGE,
)
commit_order_to_wire, commit_order_from_wire = _COMMIT.to_wire, _commit_from_wire


def abort_order_to_wire(order: AbortOrder) -> decode_pb2.AbortRequest:
    match order:
        case RouterAbort(request_id, attempt, cause, router_id, signature):
            router = decode_pb2.AbortByRouter(router_id=router_id, signature=signature)
            return decode_pb2.AbortRequest(
                request_id=request_id, attempt=attempt, cause=cause, router=router
            )
        case WriterAbort(request_id, fence, cause, has_failed_writes):
            writer = decode_pb2.AbortByWriter(
                reservation_id=fence.reservation_id,
                epoch=fence.epoch,
                has_failed_writes=has_failed_writes,
            )
            return decode_pb2.AbortRequest(
                request_id=request_id, attempt=fence.attempt, cause=cause, writer=writer
            )


def abort_order_from_wire(message: decode_pb2.AbortRequest) -> AbortOrder:
    request_id = check_request_id(message.request_id)
    match message.WhichOneof("caller"):
        case "router":
            router = message.router
            return RouterAbort(
                request_id, message.attempt, message.cause, router.router_id, router.signature
            )
        case "writer":
            writer = message.writer
            fence = WriteFence(writer.epoch, writer.reservation_id, message.attempt)
            return WriterAbort(request_id, fence, message.cause, writer.has_failed_writes)
    raise InvalidRequest("an abort says who asks for it", "caller")


# A request that leaves its decode worker: prefill's order and progress, in messages of decode's.


def hand_off_order_to_wire(order: PrefillOrder) -> decode_pb2.HandOffRequest:
    return decode_pb2.HandOffRequest(order=prefill_order_to_wire(order))


def hand_off_order_from_wire(message: decode_pb2.HandOffRequest) -> PrefillOrder:
    """Raises InvalidRequest."""
    return prefill_order_from_wire(message.order)


def hand_off_progress_to_wire(progress: PrefillProgress) -> decode_pb2.HandOffResponse:
    return decode_pb2.HandOffResponse(progress=progress_to_wire(progress))


def hand_off_progress_from_wire(message: decode_pb2.HandOffResponse) -> PrefillProgress:
    """Raises InvalidRequest for an empty message."""
    return progress_from_wire(message.progress)
