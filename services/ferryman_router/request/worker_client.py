"""Calls to workers over gRPC; only here and in `token_streams` are generated classes of theirs."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc
import grpc.aio

from ferryman.cache.resume import max_resume_pages
from ferryman.errors import FerrymanError
from ferryman.runtime.traces import attempt_traceparent
from ferryman.schedule.request import Request
from ferryman.tiers.values import WorkerLife
from ferryman.wire.codec.handoff import (
    abort_order_to_wire,
    hand_off_order_to_wire,
    hand_off_progress_from_wire,
)
from ferryman.wire.codec.prefill import prefill_order_to_wire, progress_from_wire
from ferryman.wire.codec.request import context_to_wire
from ferryman.wire.codec.scalars import keys_to_bytes
from ferryman.wire.grpc.rpc import Channels
from ferryman.wire.grpc.status import is_unexplained, typed
from ferryman.wire.nats.heartbeat import Heartbeat
from ferryman.wire.signed_orders import RouterSignatures
from ferryman.wire.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    hostcache_pb2,
    hostcache_pb2_grpc,
    prefill_pb2_grpc,
)
from ferryman.wire.values import (
    PrefillOrder,
    PrefillProgress,
    RequestContext,
    RouterAbort,
    WorkerAddress,
)
from ferryman_router.request.attempt_result import CallBroken, WorkerGone
from ferryman_router.request.metrics import RouterMetrics
from ferryman_router.routing.fleet import Fleet, WorkerName
from ferryman_router.routing.generate_request import PageKeyCache, TokenizedRequest
from ferryman_router.routing.routing_policy import RouteChoice

log = logging.getLogger(__name__)

ABORT_SECONDS = 2.0
DETACH_SECONDS = 2.0
MAX_LATE_ABORTS = 1024
MAX_PREFETCHES = 64  # under way at once, of all requests
PREFETCH_SECONDS = 1.0
_MARGIN_SECONDS = 1.0


def prefill_order(
    asked: TokenizedRequest,
    chains: PageKeyCache,
    *,
    pair: tuple[Heartbeat, Heartbeat],
    attempt: int,
    unlike_tokens: int,
    router: str,
    now: float,
) -> PrefillOrder:
    """The order of one attempt: all tokens there are, those generated at the end.

    `pair` is the prefill worker that is called and the decode worker that goes on. `unlike_tokens`
    are kept in another arithmetic.
    """
    prefill, decode = pair
    num_generated = len(chains.token_ids) - asked.prompt_len
    request = Request(
        asked.request_id,
        chains.token_ids,
        chains.of(decode.state),
        asked.params,
        asked.stop_token_ids,
        num_generated=num_generated,
        # After tokens of its own it is no longer at the end of a prompt that siblings share.
        num_siblings=0 if num_generated else asked.request.sharing.num_siblings,
        fork_points=asked.located.fork_points,
        pins=asked.located.breakpoints,
    )
    context = RequestContext(
        asked.request_id,
        attempt,
        deadline_seconds=max(0.0, asked.deadline - now),
        age_seconds=now - asked.arrived,
        traceparent=attempt_traceparent(asked.caller.traceparent, attempt),
        tenant_salt=asked.key_salt,
        adapter=asked.adapter,
        taken_from=asked.past.router_id,
    )
    address = WorkerAddress(decode.worker_id, decode.address, decode.epoch)
    state = prefill.state
    unlike_pages = unlike_tokens // state.page_size
    return PrefillOrder(
        context, prefill.epoch, address, router, request, state.digest, unlike_pages
    )


def classify_rpc_error(error: grpc.aio.AioRpcError, name: WorkerName) -> FerrymanError:
    """The error of a failed call; a status that no worker sent means that the connection broke."""
    if is_unexplained(error):
        return CallBroken(f"{name.worker_id} does not answer: {error.details()}")
    return typed(error)


async def _progress(
    name: WorkerName, call: Any, read: Callable[[Any], PrefillProgress]
) -> AsyncIterator[PrefillProgress]:
    """The progress in a call's messages. Leaving the loop ends the call."""
    try:
        async for message in call:
            yield read(message)
    except grpc.aio.AioRpcError as error:
        raise classify_rpc_error(error, name) from error
    finally:
        call.cancel()


def _life(name: WorkerName) -> WorkerLife:
    return WorkerLife(name.worker_id, name.epoch)


def _seconds_for(order: PrefillOrder) -> float:
    return order.context.deadline_seconds + _MARGIN_SECONDS


class WorkerClient:
    """The fleet's addresses, one channel each. Failures are FerrymanErrors, a broken connection is
    CallBroken. `outlive` runs what no request waits for."""

    def __init__(
        self,
        fleet: Fleet,
        channels: Channels,
        metrics: RouterMetrics,
        signatures: RouterSignatures,
        outlive: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._fleet, self._channels, self._signatures = fleet, channels, signatures
        self._metrics, self._outlive = metrics, outlive
        self._num_prefetches = 0
        # By request, with the id of the decode worker that each is for.
        self._late_aborts: OrderedDict[str, tuple[str, RouterAbort]] = OrderedDict()

    def prefill(self, name: WorkerName, order: PrefillOrder) -> AsyncIterator[PrefillProgress]:
        """Progress until the hand-off; leaving the loop cancels the attempt at the worker."""
        stub = prefill_pb2_grpc.PrefillServiceStub(self._channel(name))
        signed = self._signatures.attempt(order, self._address(name), is_move=False)
        call = stub.Prefill(prefill_order_to_wire(signed), timeout=_seconds_for(order))
        return _progress(name, call, progress_from_wire)

    def hand_off(self, name: WorkerName, order: PrefillOrder) -> AsyncIterator[PrefillProgress]:
        """The same, by the decode worker that keeps the request's state."""
        stub = decode_pb2_grpc.DecodeServiceStub(self._channel(name))
        signed = self._signatures.attempt(order, self._address(name), is_move=True)
        call = stub.HandOff(hand_off_order_to_wire(signed), timeout=_seconds_for(order))
        return _progress(name, call, hand_off_progress_from_wire)

    async def detach(self, name: WorkerName, request_id: str, attempt: int, router: str) -> bool:
        """Asks a decode worker to let a request go on elsewhere; False if it did not."""
        request = decode_pb2.DetachRequest(
            request_id=request_id,
            attempt=attempt,
            router_id=router,
            worker_epoch=name.epoch,
            signature=self._signatures.detach(request_id, attempt, router, _life(name)),
        )
        try:
            stub = decode_pb2_grpc.DecodeServiceStub(self._channel(name))
            await stub.Detach(request, timeout=DETACH_SECONDS)
        except (grpc.aio.AioRpcError, WorkerGone) as error:
            log.debug("not detached id=%s worker=%s: %s", request_id, name.worker_id, error)
            return False
        return True

    async def abort(self, name: WorkerName, order: RouterAbort) -> None:
        """Sends decode an abort; a worker that does not get it is gone, or will notice by its
        lease."""
        if self._fleet.get(name) is None:
            return
        stub = decode_pb2_grpc.DecodeServiceStub(self._channel(name))
        signed = self._signatures.abort(order, _life(name))
        try:
            await stub.Abort(abort_order_to_wire(signed), timeout=ABORT_SECONDS)
        except grpc.aio.AioRpcError as error:
            log.warning(
                "abort not delivered id=%s worker=%s: %s",
                order.request_id,
                name.worker_id,
                error.details(),
            )

    def end_past(self, asked: TokenizedRequest) -> None:
        """Has the previous router's latest decode worker end its work on a request that goes on
        here: no client reads that answer any more. A router that began just now may not know that
        worker yet; it is told when it joins."""
        past = asked.past
        if not past.decode:
            return
        abort = RouterAbort(asked.request_id, past.attempt, "taken_over", past.router_id)
        for worker in self._fleet:
            if worker.beat.worker_id == past.decode:
                self._outlive(self.abort(worker.name, abort))
                return
        self._late_aborts[asked.request_id] = past.decode, abort
        while len(self._late_aborts) > MAX_LATE_ABORTS:
            self._late_aborts.popitem(last=False)

    def on_joined(self, beat: Heartbeat) -> None:
        """A worker joined: it gets the aborts that wait for it."""
        late = [name for name, (of, _) in self._late_aborts.items() if of == beat.worker_id]
        for request_id in late:
            _, abort = self._late_aborts.pop(request_id)
            self._outlive(self.abort(WorkerName(beat.worker_id, beat.epoch), abort))

    def prefetch(self, chosen: RouteChoice, prefill: Heartbeat, order: PrefillOrder) -> None:
        """Has the host-cache of the prefill worker's node start to fetch what storage or a peer has
        of the prompt, if that is worth it, before the worker has read its order. The worker's own
        call joins it by the attempt.

        Never waits, and counts how it went. Beyond MAX_PREFETCHES there is only the worker's own.
        """
        host = self._fleet.host_caches().get(prefill.node)
        if not chosen.is_worth_fetching or host is None or host.state != prefill.state:
            return
        if self._num_prefetches >= MAX_PREFETCHES:
            self._metrics.prefetches.labels("too_many").inc()
            return
        page_size = host.state.page_size
        request = hostcache_pb2.PrefetchRequest(  # policy and threshold are the host-cache's
            epoch=host.epoch,
            context=context_to_wire(order.context),
            page_keys=keys_to_bytes(order.request.keys),
            have_pages=chosen.arrival.device_tokens // page_size,
            max_pages=max_resume_pages(len(order.request.token_ids), page_size),
            phase=hostcache_pb2.PREFETCH_PHASE_START,
        )
        self._num_prefetches += 1
        self._outlive(self._prefetch(host.address, request))

    async def _prefetch(self, address: str, request: hostcache_pb2.PrefetchRequest) -> None:
        stub = hostcache_pb2_grpc.HostCacheServiceStub(self._channels.to(address))
        try:
            await stub.Prefetch(request, timeout=PREFETCH_SECONDS)
        except grpc.aio.AioRpcError as error:
            self._metrics.prefetches.labels("failed").inc()
            log.debug("prefetch not begun id=%s: %s", request.context.request_id, error.details())
        else:
            self._metrics.prefetches.labels("begun").inc()
        finally:
            self._num_prefetches -= 1

    def _channel(self, name: WorkerName) -> grpc.aio.Channel:
        return self._channels.to(self._address(name).address)

    def _address(self, name: WorkerName) -> WorkerAddress:
        worker = self._fleet.get(name)
        if worker is None:
            raise WorkerGone(f"{name.worker_id} has left")
        return WorkerAddress(name.worker_id, worker.beat.address, name.epoch)
