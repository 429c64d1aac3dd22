"""Prefetches that the router has host-caches begin: beside the request, bounded, counted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

import grpc.aio

from ferryman.wire.beats import Beat
from ferryman.wire.codec.request import context_to_wire
from ferryman.wire.codec.scalars import keys_to_bytes
from ferryman.wire.rpc import Channels, tags_for, tags_to_metadata
from ferryman.wire.v1 import hostcache_pb2 as pb
from ferryman.wire.v1 import hostcache_pb2_grpc
from ferryman_router.orders import PrefetchOrder

log = logging.getLogger(__name__)

MAX_UNDER_WAY = 64
START_SECONDS = 1.0


class Prefetches:
    """`count` is told how each one went: begun, failed, or too_many."""

    def __init__(
        self,
        channels: Channels,
        *,
        outlive: Callable[[Coroutine[Any, Any, None]], None],
        count: Callable[[str], None],
    ) -> None:
        self._channels, self._outlive, self._count = channels, outlive, count
        self._under_way = 0

    def begin(self, host: Beat, order: PrefetchOrder) -> None:
        """Never waits; beyond MAX_UNDER_WAY there is no prefetch but the worker's own."""
        if self._under_way >= MAX_UNDER_WAY:
            self._count("too_many")
            return
        self._under_way += 1
        self._outlive(self._begin(host, order))

    async def _begin(self, host: Beat, order: PrefetchOrder) -> None:
        stub = hostcache_pb2_grpc.HostCacheServiceStub(self._channels.to(host.address))
        metadata = tags_to_metadata(tags_for(order.context))
        try:
            await stub.Prefetch(request_of(order), timeout=START_SECONDS, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            self._count("failed")
            log.debug("prefetch not begun id=%s: %s", order.context.request_id, error.details())
        else:
            self._count("begun")
        finally:
            self._under_way -= 1


def request_of(order: PrefetchOrder) -> pb.PrefetchRequest:
    """Policy and threshold are left to the host-cache."""
    return pb.PrefetchRequest(
        epoch=order.epoch,
        context=context_to_wire(order.context),
        page_keys=keys_to_bytes(order.keys),
        have_pages=order.have_pages,
        max_pages=order.max_pages,
        phase=pb.PREFETCH_PHASE_START,
    )
