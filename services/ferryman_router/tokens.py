"""One long stream of token frames from each decode worker, given out to the journeys.

    worker joins → stream opens with the cursors of its journeys → frames → worker is lost

A stream that breaks while the worker lives is opened again, and the cursors say from where on
tokens are lacking; what comes twice is dropped by the journeys' ledgers. When it cannot be opened
for a while, the worker is taken for lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

import grpc.aio

from ferryman.errors import FerrymanError, Stale
from ferryman.wire.codec.tokens import cursor_to_wire, request_tokens_from_wire
from ferryman.wire.rpc import Channels
from ferryman.wire.v1 import decode_pb2, decode_pb2_grpc
from ferryman.wire.values import RequestTokens, TokenCursor
from ferryman_router.calls import understood
from ferryman_router.fleet import WorkerName
from ferryman_router.verdict import WorkerGone

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.1
STEADY_SECONDS = 1.0


class TokenStream:
    """The stream of one life of one decode worker. `give` takes every entry of every frame."""

    def __init__(
        self,
        name: WorkerName,
        address: str,
        router_id: str,
        *,
        cursors: Callable[[WorkerName], Iterable[TokenCursor]],
        give: Callable[[RequestTokens], None],
    ) -> None:
        self._name, self._address, self._router_id = name, address, router_id
        self._cursors, self._give = cursors, give
        self._call: (
            grpc.aio.UnaryStreamCall[decode_pb2.TokensRequest, decode_pb2.TokensResponse] | None
        ) = None
        self._asks_again = False

    async def run(self, channels: Channels, patience: float) -> None:
        """Reads until cancelled; returns when the worker cannot be reached for `patience`."""
        loop = asyncio.get_running_loop()
        broken_since = loop.time()
        while True:
            opened = loop.time()
            try:
                was_heard = await self._read(channels)
            except FerrymanError as error:
                was_heard = False
                log.debug("no token stream worker=%s: %s", self._name.worker_id, error)
            now = loop.time()
            if was_heard or now - opened > STEADY_SECONDS:
                broken_since = now
            if now - broken_since > patience:
                return
            if not self._asks_again:
                await asyncio.sleep(RETRY_SECONDS)

    def ask_again(self) -> None:
        """Tokens are lacking: the stream is opened anew with the cursors as they are now."""
        if self._call is not None and not self._asks_again:
            self._asks_again = True
            self._call.cancel()

    async def _read(self, channels: Channels) -> bool:
        """Whether anything was heard on this stream."""
        self._asks_again, was_heard = False, False
        stub = decode_pb2_grpc.DecodeServiceStub(channels.to(self._address))
        resume = [cursor_to_wire(cursor) for cursor in self._cursors(self._name)]
        request = decode_pb2.TokensRequest(
            router_id=self._router_id, worker_epoch=self._name.epoch, resume=resume
        )
        call = self._call = stub.Tokens(request)
        try:
            async for frame in call:
                was_heard = True
                self._give_out(frame)
        except grpc.aio.AioRpcError as error:
            if self._asks_again:
                return True
            if was_heard:
                log.info("token stream broke worker=%s: %s", self._name.worker_id, error.details())
                return True
            raise understood(error, self._name) from error
        except asyncio.CancelledError:
            if not self._asks_again or _is_being_cancelled():
                raise
            return True
        finally:
            call.cancel()
        raise WorkerGone(f"{self._name.worker_id} ended its token stream")

    def _give_out(self, frame: decode_pb2.TokensResponse) -> None:
        if frame.epoch != self._name.epoch:
            raise Stale(f"{self._name.worker_id} sends tokens of another epoch")
        for entry in frame.requests:
            self._give(request_tokens_from_wire(entry))


def _is_being_cancelled() -> bool:
    """Cancelling the call raises CancelledError here as well; this tells who was meant."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
