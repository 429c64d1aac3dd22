"""A prefill worker without an engine: it reserves at decode, computes nothing, commits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
from tests.doubles.fake_engine import fake_scores
from tests.harness.router.fake_worker import PAGE_SIZE, FakeRouterWorker, reserve_order
from tests.harness.router.faults import FaultStage, Moment

from ferryman.errors import Unavailable, WrongEpoch
from ferryman.handoff.usage import CachedTokens
from ferryman.schedule.batch import Sampled
from ferryman.schedule.prompt_scores import PromptScores, ScoreRequest
from ferryman.wire.codec.handoff import commit_order_to_wire, reserve_order_to_wire
from ferryman.wire.codec.prefill import prefill_order_from_wire, progress_to_wire
from ferryman.wire.grpc.rpc import channel
from ferryman.wire.grpc.status import typed_errors
from ferryman.wire.v1 import decode_pb2_grpc, prefill_pb2_grpc
from ferryman.wire.values import (
    CommitOrder,
    PrefillAdmitted,
    PrefillChunkDone,
    PrefillHandedOff,
    PrefillOrder,
    PrefillQueued,
    UncachedPages,
    Usage,
)


class FakePrefill(FakeRouterWorker, prefill_pb2_grpc.PrefillServiceServicer):
    """Reserves at decode, computes nothing, commits. `orders` are what it was sent, `ends` says
    how they ended here."""

    role = "prefill"

    def __init__(self, script: tuple[int, ...], worker_id: str = "") -> None:
        super().__init__(script, worker_id)
        self.orders: list[PrefillOrder] = []
        self.num_wrong_epochs = 0
        self.num_calls = 0
        self.ends: asyncio.Queue[str] = asyncio.Queue()

    def held(self) -> dict[str, object]:
        return {"calls": self.num_calls} if self.num_calls else {}

    def register(self, server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, server)

    async def Prefill(self, request: Any, context: Any) -> AsyncIterator[Any]:
        order = prefill_order_from_wire(request)
        self.orders.append(order)
        if order.worker_epoch != self.epoch:
            self.num_wrong_epochs += 1
            raise WrongEpoch("another life of this fake was meant")
        self.num_calls += 1
        try:
            attempt = f"{order.context.request_id}.{order.context.attempt}"
            await self.meet(Moment(FaultStage.ORDER, attempt))
            async for progress in self._answered(order):
                yield progress
        finally:
            self.num_calls -= 1

    async def _answered(self, order: PrefillOrder) -> AsyncIterator[Any]:
        """Progress to the end; how it ended is kept."""
        try:
            async for progress in self._progress(order):
                yield progress_to_wire(progress)
        except asyncio.CancelledError:
            self.ends.put_nowait("cancelled")
            raise
        except Unavailable:
            self.ends.put_nowait("failed")
            raise
        self.ends.put_nowait("handed_off")

    async def _progress(self, order: PrefillOrder) -> AsyncIterator[Any]:
        await self.meet(Moment(FaultStage.PREFILL))
        yield PrefillQueued()
        usage = _usage(order)
        async with channel(order.decode.address) as to_decode:
            stub = decode_pb2_grpc.DecodeServiceStub(to_decode)
            with typed_errors():
                reserve = reserve_order(order, self)
                reserved = await stub.Reserve(reserve_order_to_wire(reserve), timeout=120)
            await self.meet(Moment(FaultStage.RESERVED))
            yield PrefillAdmitted(usage)
            for piece in self._told(FaultStage.SCORES, self._scores(order)):
                yield piece
            await self.meet(Moment(FaultStage.SCORES))
            await self.meet(Moment(FaultStage.COMMIT))
            yield PrefillChunkDone(len(order.request.token_ids))
            first = Sampled(self.script[order.request.num_generated % len(self.script)], {})
            with typed_errors():
                commit = CommitOrder(
                    order.context, reserved.reservation_id, reserved.epoch, (), (), first, usage
                )
                await stub.Commit(commit_order_to_wire(commit), timeout=120)
        await self.meet(Moment(FaultStage.COMMITTED))
        for piece in self._told(FaultStage.COMMITTED, []):
            yield piece
        await self.meet(Moment(FaultStage.HANDED_OFF))
        yield PrefillHandedOff(usage, 1024, 0.001)

    def _scores(self, order: PrefillOrder) -> list[PromptScores]:
        """As the fake engine's, in pieces of four tokens at most."""
        num_best = order.request.prompt_logprobs
        if num_best is None or order.request.prompt_len == 1:
            return []
        wanted = ScoreRequest(1, order.request.token_ids[1:], num_best)
        return list(fake_scores(wanted).pieces(4 * (1 + num_best)))

    def _told(self, stage: FaultStage, scores: list[PromptScores]) -> list[PromptScores]:
        """The scores of the prompt that it tells at a stage."""
        for fault in self.faults:
            scores = fault.told(self, stage, scores)
        return scores


def _usage(order: PrefillOrder) -> Usage:
    """As if the first page had been cached on the device, when there is more than one."""
    prompt_len = len(order.request.token_ids)
    cached = PAGE_SIZE if prompt_len > PAGE_SIZE else 0
    pages = -(-prompt_len // PAGE_SIZE) - cached // PAGE_SIZE
    uncached = (UncachedPages("never_seen", pages),)
    kept = prompt_len // PAGE_SIZE * PAGE_SIZE
    return Usage(prompt_len, 0, CachedTokens(device=cached), uncached, kept_tokens=kept)
