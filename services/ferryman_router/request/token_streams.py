"""One long stream of token frames from each decode worker, delivered to the requests.

    worker joins → stream opens with the cursors of its requests → frames → worker is lost

A stream that breaks while the worker lives is opened again, and the cursors show from where on
tokens are missing; what comes twice is dropped by the requests' ledgers. When it cannot be opened
for a while, the worker is treated as lost.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import grpc.aio

from ferryman.errors import FerrymanError, Stale, WrongEpoch
from ferryman.runtime.background import Background
from ferryman.tiers.values import WorkerLife
from ferryman.wire.codec.tokens import cursor_to_wire, request_tokens_from_wire
from ferryman.wire.grpc.rpc import Channels
from ferryman.wire.nats.heartbeat import DECODE
from ferryman.wire.signed_orders import RouterSignatures
from ferryman.wire.v1 import decode_pb2, decode_pb2_grpc
from ferryman_router.request.attempt_result import WorkerGone
from ferryman_router.request.metrics import RouterMetrics
from ferryman_router.request.request_table import RequestTable
from ferryman_router.request.worker_client import classify_rpc_error
from ferryman_router.routing.dispatcher import Dispatcher
from ferryman_router.routing.fleet import (
    UNREACHABLE,
    Effect,
    Fleet,
    WorkerJoined,
    WorkerLeft,
    WorkerName,
)

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class TokenReader:
    """The router that reads, and its signatures."""

    router_id: str
    signatures: RouterSignatures


class TokenStream:
    """The stream of one life of one decode worker, for the requests that it decodes."""

    def __init__(
        self,
        name: WorkerName,
        address: str,
        reader: TokenReader,
        requests: RequestTable,
    ) -> None:
        self._name, self._address, self._reader = name, address, reader
        self._requests = requests
        self._call: (
            grpc.aio.UnaryStreamCall[decode_pb2.TokensRequest, decode_pb2.TokensResponse] | None
        ) = None
        self._asks_again = False

    async def run(self, channels: Channels, patience: float) -> None:
        """Reads until cancelled; returns when the worker cannot be reached for `patience`."""
        loop = asyncio.get_running_loop()
        broken_since = loop.time()
        while True:
            try:
                was_open = await self._read(channels)
            except WrongEpoch:
                return  # another life listens there
            except FerrymanError as error:
                was_open = False
                log.debug("no token stream worker=%s: %s", self._name.worker_id, error)
            now = loop.time()
            if was_open:
                broken_since = now
            if now - broken_since > patience:
                return
            if not self._asks_again:
                await asyncio.sleep(RETRY_SECONDS)

    def ask_again(self) -> None:
        """Tokens are missing: the stream is opened again with the cursors as they are now."""
        if self._call is not None and not self._asks_again:
            self._asks_again = True
            self._call.cancel()

    async def _read(self, channels: Channels) -> bool:
        """Reads one call; returns whether the worker had accepted it. A failing connection may
        take long, too."""
        self._asks_again, was_open = False, False
        stub = decode_pb2_grpc.DecodeServiceStub(channels.to(self._address))
        resume = [cursor_to_wire(cursor) for cursor in self._requests.cursors(self._name)]
        router_id, life = self._reader.router_id, WorkerLife(self._name.worker_id, self._name.epoch)
        request = decode_pb2.TokensRequest(
            router_id=router_id,
            worker_epoch=life.epoch,
            resume=resume,
            signature=self._reader.signatures.tokens(router_id, life),
        )
        call = self._call = stub.Tokens(request)
        under_way = self._requests.under_way
        try:
            await call.initial_metadata()
            was_open = not call.done()
            async for frame in call:
                if frame.epoch != self._name.epoch:
                    raise Stale(f"{self._name.worker_id} sends tokens of another epoch")
                for entry in frame.requests:
                    # An entry of no request under way is late, and dropped.
                    if (runner := under_way.get(entry.request_id)) is not None:
                        runner.on_tokens(request_tokens_from_wire(entry))
        except grpc.aio.AioRpcError as error:
            if self._asks_again:
                return True
            if was_open:
                log.info("token stream broke worker=%s: %s", self._name.worker_id, error.details())
                return True
            raise classify_rpc_error(error, self._name) from error
        except asyncio.CancelledError:
            if not self._asks_again or _is_being_cancelled():
                raise
            return True
        finally:
            call.cancel()
        raise WorkerGone(f"{self._name.worker_id} ended its token stream")


def _is_being_cancelled() -> bool:
    """Whether this task is cancelled: cancelling only the call raises the same error here."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class WorkerStreams:
    """One token stream for every decode worker that is believed to live; a worker that cannot be
    reached for `patience` seconds is lost."""

    def __init__(
        self,
        reader: TokenReader,
        fleet: Fleet,
        *,
        requests: RequestTable,
        dispatcher: Dispatcher,
        channels: Channels,
        background: Background,
        metrics: RouterMetrics,
        patience: float,
    ) -> None:
        self._reader, self._fleet, self._requests = reader, fleet, requests
        self._dispatcher, self._channels, self._background = dispatcher, channels, background
        self._metrics, self._patience = metrics, patience
        self._streams: dict[WorkerName, tuple[TokenStream, asyncio.Task[None]]] = {}

    def on_fleet_effect(self, effect: Effect) -> None:
        """A worker came or went; waiting requests are looked at again."""
        match effect:
            case WorkerJoined(beat):
                name = WorkerName(beat.worker_id, beat.epoch)
                log.info("worker joined id=%s address=%s", beat.worker_id, beat.address)
                self._requests.came_back(name)
                if beat.serves(DECODE):
                    self._hold(name, beat.address)
            case WorkerLeft(name, role, cause):
                log.warning("worker lost id=%s cause=%s", name.worker_id, cause)
                self._metrics.lost_workers.labels(role, cause).inc()
                self._requests.on_worker_lost(name, cause)
                if (held := self._streams.pop(name, None)) is not None:
                    held[1].cancel()
        self._dispatcher.serve()

    def ask_again(self, name: WorkerName) -> None:
        """Tokens are missing on this worker's stream."""
        if (held := self._streams.get(name)) is not None:
            held[0].ask_again()

    def _hold(self, name: WorkerName, address: str) -> None:
        stream = TokenStream(name, address, self._reader, self._requests)

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled():
                self.lose(name, UNREACHABLE)

        task = self._background.start(stream.run(self._channels, self._patience))
        task.add_done_callback(ended)
        self._streams[name] = stream, task

    def lose(self, name: WorkerName, cause: str) -> None:
        """Ends this life, even if heartbeats of it still come. However many callers report the
        loss, it counts once."""
        for effect in self._fleet.lose(name, cause):
            self.on_fleet_effect(effect)
