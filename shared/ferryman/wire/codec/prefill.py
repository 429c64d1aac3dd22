"""PrefillService: the order, and what a prefill worker tells of its progress."""

from __future__ import annotations

from ferryman.errors import InvalidRequest
from ferryman.handoff.usage import CachedTokens
from ferryman.wire.codec.request import (
    address_from_wire,
    address_to_wire,
    context_from_wire,
    context_to_wire,
    request_from_fields,
    request_to_fields,
    sampled_from_wire,
    sampled_to_wire,
    uncached_from_wire,
    uncached_to_wire,
    usage_from_wire,
    usage_to_wire,
)
from ferryman.wire.codec.scalars import kind_from_wire, kind_to_wire
from ferryman.wire.v1 import prefill_pb2
from ferryman.wire.values import (
    Admitted,
    ChunkDone,
    HandedOff,
    KindPlan,
    PlanSummary,
    PrefillOrder,
    PrefillProgress,
    Queued,
)


def prefill_order_to_wire(order: PrefillOrder) -> prefill_pb2.PrefillRequest:
    return prefill_pb2.PrefillRequest(
        context=context_to_wire(order.context),
        worker_epoch=order.worker_epoch,
        decode=address_to_wire(order.decode),
        router_id=order.router_id,
        manifest_digest=order.manifest_digest,
        **request_to_fields(order.request),
    )


def prefill_order_from_wire(message: prefill_pb2.PrefillRequest) -> PrefillOrder:
    return PrefillOrder(
        context=context_from_wire(message.context),
        worker_epoch=message.worker_epoch,
        decode=address_from_wire(message.decode),
        router_id=message.router_id,
        request=request_from_fields(message),
        manifest_digest=message.manifest_digest,
    )


def plan_to_wire(plan: PlanSummary) -> prefill_pb2.PlanSummary:
    kinds = [
        prefill_pb2.KindPlan(
            kind=kind_to_wire(each.kind),
            reused=each.reused,
            loaded=each.loaded,
            allocated=each.allocated,
        )
        for each in plan.kinds
    ]
    return prefill_pb2.PlanSummary(
        position=plan.position,
        prompt_len=plan.prompt_len,
        recurrent=plan.recurrent,
        kinds=kinds,
        uncached_reasons=uncached_to_wire(plan.uncached),
        snapshots=plan.snapshots,
        cached_device_tokens=plan.cached.device,
        cached_host_tokens=plan.cached.host,
        cached_storage_tokens=plan.cached.storage,
        cached_peer_tokens=plan.cached.peer,
        load_bytes=plan.load_bytes,
        load_seconds=plan.load_seconds,
        compute_seconds=plan.compute_seconds,
        recompute_seconds=plan.recompute_seconds,
    )


def plan_from_wire(message: prefill_pb2.PlanSummary) -> PlanSummary:
    kinds = tuple(
        KindPlan(kind_from_wire(each.kind), each.reused, each.loaded, each.allocated)
        for each in message.kinds
    )
    return PlanSummary(
        position=message.position,
        prompt_len=message.prompt_len,
        recurrent=message.recurrent,
        kinds=kinds,
        uncached=uncached_from_wire(message.uncached_reasons),
        snapshots=tuple(message.snapshots),
        cached=CachedTokens(
            message.cached_device_tokens,
            message.cached_host_tokens,
            message.cached_storage_tokens,
            message.cached_peer_tokens,
        ),
        load_bytes=message.load_bytes,
        load_seconds=message.load_seconds,
        compute_seconds=message.compute_seconds,
        recompute_seconds=message.recompute_seconds,
    )


def progress_to_wire(progress: PrefillProgress) -> prefill_pb2.PrefillResponse:
    match progress:
        case Queued(position):
            queued = prefill_pb2.PrefillQueued(position=position)
            return prefill_pb2.PrefillResponse(queued=queued)
        case Admitted(plan):
            admitted = prefill_pb2.PrefillAdmitted(plan=plan_to_wire(plan))
            return prefill_pb2.PrefillResponse(admitted=admitted)
        case ChunkDone(index, count, start, end):
            chunk = prefill_pb2.PrefillChunk(index=index, count=count, start=start, end=end)
            return prefill_pb2.PrefillResponse(chunk=chunk)
        case HandedOff():
            return prefill_pb2.PrefillResponse(handed_off=handed_off_to_wire(progress))


def progress_from_wire(message: prefill_pb2.PrefillResponse) -> PrefillProgress:
    match message.WhichOneof("progress"):
        case "queued":
            return Queued(message.queued.position)
        case "admitted":
            return Admitted(plan_from_wire(message.admitted.plan))
        case "chunk":
            chunk = message.chunk
            return ChunkDone(chunk.index, chunk.count, chunk.start, chunk.end)
        case "handed_off":
            return handed_off_from_wire(message.handed_off)
    raise InvalidRequest("a progress message says nothing", "progress")


def handed_off_to_wire(done: HandedOff) -> prefill_pb2.PrefillHandedOff:
    return prefill_pb2.PrefillHandedOff(
        reservation_id=done.reservation_id,
        first=sampled_to_wire(done.first),
        usage=usage_to_wire(done.usage),
        num_bytes=done.num_bytes,
        seconds=done.seconds,
        path=done.path,
    )


def handed_off_from_wire(message: prefill_pb2.PrefillHandedOff) -> HandedOff:
    return HandedOff(
        reservation_id=message.reservation_id,
        first=sampled_from_wire(message.first),
        usage=usage_from_wire(message.usage),
        num_bytes=message.num_bytes,
        seconds=message.seconds,
        path=message.path,
    )
