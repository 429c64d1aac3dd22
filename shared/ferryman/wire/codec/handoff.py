"""DecodeService: reservations, commits and aborts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ferryman.errors import InvalidRequest
from ferryman.handoff.values import PageRange, Reservation, UnitDigest, WantedUnit
from ferryman.ids import check_request_id
from ferryman.wire.codec.request import (
    address_from_wire,
    address_to_wire,
    context_from_wire,
    context_to_wire,
    request_from_fields,
    request_to_fields,
    sampled_from_wire,
    sampled_to_wire,
    usage_from_wire,
    usage_to_wire,
)
from ferryman.wire.codec.scalars import (
    digest_from_bytes,
    kind_from_wire,
    kind_to_wire,
    milliseconds,
    seconds,
)
from ferryman.wire.planes import GrpcPlane, NixlGrant, NixlOffer, Plane, PlaneOffer
from ferryman.wire.v1 import decode_pb2, types_pb2
from ferryman.wire.values import AbortOrder, CommitOrder, ReserveOrder


def range_to_wire(span: PageRange) -> types_pb2.PageRange:
    return types_pb2.PageRange(
        kind=kind_to_wire(span.kind), first_page=span.first, end_page=span.end
    )


def range_from_wire(message: types_pb2.PageRange) -> PageRange:
    return PageRange(kind_from_wire(message.kind), message.first_page, message.end_page)


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


def reserve_order_to_wire(order: ReserveOrder) -> decode_pb2.ReserveRequest:
    return decode_pb2.ReserveRequest(
        context=context_to_wire(order.context),
        worker_epoch=order.worker_epoch,
        writer=address_to_wire(order.writer),
        router_id=order.router_id,
        manifest_digest=order.manifest_digest,
        manifest_json=order.manifest_json,
        nixl=_offer_to_wire(order.offer),
        **request_to_fields(order.request),
    )


def reserve_order_from_wire(message: decode_pb2.ReserveRequest) -> ReserveOrder:
    return ReserveOrder(
        context=context_from_wire(message.context),
        worker_epoch=message.worker_epoch,
        writer=address_from_wire(message.writer),
        router_id=message.router_id,
        request=request_from_fields(message),
        manifest_digest=message.manifest_digest,
        manifest_json=message.manifest_json,
        offer=_offer_from_wire(message),
    )


def _offer_to_wire(offer: PlaneOffer) -> decode_pb2.NixlOffer | None:
    return decode_pb2.NixlOffer(presence=offer.presence) if isinstance(offer, NixlOffer) else None


def _offer_from_wire(message: decode_pb2.ReserveRequest) -> PlaneOffer:
    return NixlOffer(message.nixl.presence) if message.HasField("nixl") else GrpcPlane()


def _plane_to_wire(plane: Plane) -> decode_pb2.NixlGrant | None:
    if not isinstance(plane, NixlGrant):
        return None
    return decode_pb2.NixlGrant(
        agent=plane.agent,
        metadata=plane.metadata,
        device=plane.device,
        addresses=plane.addresses,
    )


def _plane_from_wire(message: decode_pb2.ReserveResponse, num_wanted: int) -> Plane:
    if not message.HasField("nixl"):
        return GrpcPlane()
    grant = message.nixl
    if len(grant.addresses) != num_wanted:
        raise InvalidRequest(f"{len(grant.addresses)} addresses for {num_wanted} units", "nixl")
    return NixlGrant(grant.agent, grant.metadata, grant.device, tuple(grant.addresses))


@dataclass(frozen=True, slots=True)
class ReserveAnswer:
    """A reservation, what its slots look like, how long a prefix decode has, how to write."""

    reservation: Reservation
    manifest_digest: str
    reused_tokens: int = 0
    plane: Plane = field(default_factory=GrpcPlane)


def reserve_answer_to_wire(answer: ReserveAnswer) -> decode_pb2.ReserveResponse:
    return decode_pb2.ReserveResponse(
        reservation_id=answer.reservation.reservation_id,
        epoch=answer.reservation.epoch,
        wanted=wanted_to_wire(answer.reservation.wanted),
        lease_ms=milliseconds(answer.reservation.lease_seconds),
        manifest_digest=answer.manifest_digest,
        reused_tokens=answer.reused_tokens,
        nixl=_plane_to_wire(answer.plane),
    )


def reserve_answer_from_wire(message: decode_pb2.ReserveResponse, attempt: int) -> ReserveAnswer:
    """`attempt` is the caller's own: it asked for it, so the answer does not repeat it."""
    reservation = Reservation(
        reservation_id=message.reservation_id,
        epoch=message.epoch,
        attempt=attempt,
        wanted=wanted_from_wire(message.wanted),
        lease_seconds=seconds(message.lease_ms),
    )
    plane = _plane_from_wire(message, len(reservation.wanted))
    return ReserveAnswer(reservation, message.manifest_digest, message.reused_tokens, plane)


def commit_order_to_wire(order: CommitOrder) -> decode_pb2.CommitRequest:
    return decode_pb2.CommitRequest(
        context=context_to_wire(order.context),
        reservation_id=order.reservation_id,
        epoch=order.epoch,
        written=[range_to_wire(span) for span in order.written],
        digests=[digest_to_wire(digest) for digest in order.digests],
        first=sampled_to_wire(order.first),
        usage=usage_to_wire(order.usage),
    )


def commit_order_from_wire(message: decode_pb2.CommitRequest) -> CommitOrder:
    if not message.HasField("first"):
        raise InvalidRequest("a commit carries the first token", "first")
    return CommitOrder(
        context=context_from_wire(message.context),
        reservation_id=message.reservation_id,
        epoch=message.epoch,
        written=tuple(range_from_wire(span) for span in message.written),
        digests=tuple(digest_from_wire(digest) for digest in message.digests),
        first=sampled_from_wire(message.first),
        usage=usage_from_wire(message.usage),
    )


def abort_order_to_wire(order: AbortOrder) -> decode_pb2.AbortRequest:
    return decode_pb2.AbortRequest(
        request_id=order.request_id,
        attempt=order.attempt,
        reservation_id=order.reservation_id,
        epoch=order.epoch,
        cause=order.cause,
        is_writer_done=order.is_writer_done,
        has_failed_writes=order.has_failed_writes,
    )


def abort_order_from_wire(message: decode_pb2.AbortRequest) -> AbortOrder:
    return AbortOrder(
        request_id=check_request_id(message.request_id),
        attempt=message.attempt,
        cause=message.cause,
        reservation_id=message.reservation_id,
        epoch=message.epoch,
        is_writer_done=message.is_writer_done,
        has_failed_writes=message.has_failed_writes,
    )
