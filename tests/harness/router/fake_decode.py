"""A decode worker without an engine: it reserves, commits, streams, and hands requests off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import grpc.aio
from tests.harness.router.fake_worker import PAGE_SIZE, FakeRouterWorker, reserve_order
from tests.harness.router.faults import FaultStage, GivenUp, Moment

from ferryman.errors import LeaseLost, RequestDetached, Stale
from ferryman.handoff.offsets import EMPTY_HASH, TokenFrame, extend_hash
from ferryman.handoff.usage import NONE_CACHED
from ferryman.schedule.batch import Sampled
from ferryman.schedule.request import FinishReason, Request
from ferryman.wire.codec.handoff import (
    abort_order_from_wire,
    commit_order_from_wire,
    commit_order_to_wire,
    hand_off_order_from_wire,
    hand_off_progress_to_wire,
    reserve_order_from_wire,
    reserve_order_to_wire,
)
from ferryman.wire.codec.tokens import cursor_from_wire, request_tokens_to_wire
from ferryman.wire.grpc.rpc import channel
from ferryman.wire.grpc.status import failure_of, typed_errors
from ferryman.wire.v1 import decode_pb2, decode_pb2_grpc
from ferryman.wire.values import (
    CommitOrder,
    Ending,
    PrefillAdmitted,
    PrefillHandedOff,
    PrefillOrder,
    PrefillQueued,
    RequestTokens,
    ReserveOrder,
    RouterAbort,
    StreamContinues,
    StreamFinished,
    Usage,
)
from ferryman_decode.departure import without_last


@dataclass
class RunningFake:
    """One request at a decode worker."""

    request: Request
    attempt: int
    router_id: str
    usage: Usage
    made: list[int] = field(default_factory=list)


class FakeDecode(FakeRouterWorker, decode_pb2_grpc.DecodeServiceServicer):
    """Reserves, commits, streams; `aborted` records what it was told to give up."""

    role = "decode"

    def __init__(self, script: tuple[int, ...], worker_id: str = "") -> None:
        super().__init__(script, worker_id)
        self.reserved: dict[str, ReserveOrder] = {}
        self.running: dict[str, RunningFake] = {}
        self.over: dict[str, RunningFake] = {}
        self.kept: dict[str, RunningFake] = {}
        self.moved: list[PrefillOrder] = []
        self.aborted: list[tuple[str, int, str]] = []
        self.aborts = asyncio.Condition()
        self.out: dict[str, asyncio.Queue[list[RequestTokens]]] = {}
        self.resumed_offsets: list[int] = []
        self.holds = NONE_CACHED
        self.jobs: set[asyncio.Task[None]] = set()

    def register(self, server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, server)

    def held(self) -> dict[str, object]:
        """State that is `kept` is not among it: a real worker gives that up by itself."""
        lists = {"reserved": list(self.reserved), "running": list(self.running)}
        return {role: names for role, names in lists.items() if names}

    async def Reserve(self, request: Any, context: Any) -> decode_pb2.ReserveResponse:
        order = reserve_order_from_wire(request)
        await self.meet(Moment(FaultStage.RESERVE))
        if self._is_aborted(order):
            raise Stale("the router has given it up")
        reservation_id = f"res-{order.context.request_id}-{order.context.attempt}"
        self.reserved[reservation_id] = order
        return decode_pb2.ReserveResponse(reservation_id=reservation_id, epoch=self.epoch)

    async def Commit(self, request: Any, context: Any) -> decode_pb2.CommitResponse:
        commit = commit_order_from_wire(request)
        await self.meet(Moment(FaultStage.COMMIT))
        order = self.reserved.pop(commit.reservation_id, None)
        if order is None:
            raise Stale("no such reservation")
        running = RunningFake(order.request, order.context.attempt, order.router_id, commit.usage)
        self.running[order.context.request_id] = running
        job = asyncio.get_running_loop().create_task(self._decode(running))
        self.jobs.add(job)
        job.add_done_callback(self.jobs.discard)
        return decode_pb2.CommitResponse()

    async def Abort(self, request: Any, context: Any) -> decode_pb2.AbortResponse:
        order = abort_order_from_wire(request)
        assert isinstance(order, RouterAbort)
        running = self.running.get(order.request_id)
        was_known = running is not None and running.attempt <= order.attempt
        if was_known:
            del self.running[order.request_id]
        async with self.aborts:
            self.aborted.append((order.request_id, order.attempt, order.cause))
            self.aborts.notify_all()
        kept = self.kept.get(order.request_id)
        if kept is not None and kept.attempt < order.attempt:
            del self.kept[order.request_id]
        for name in [name for name, one in self.reserved.items() if self._is_aborted(one)]:
            del self.reserved[name]
        return decode_pb2.AbortResponse(was_known=was_known)

    def _is_aborted(self, order: ReserveOrder) -> bool:
        """Whether the router has ended this attempt, or a later one of the request."""
        name, number = order.context.request_id, order.context.attempt
        return any(name == aborted and number <= last for aborted, last, _ in self.aborted)

    async def Detach(self, request: Any, context: Any) -> decode_pb2.DetachResponse:
        await self.meet(Moment(FaultStage.DETACH))
        running = self.running.pop(request.request_id)
        assert (running.attempt, running.router_id) == (request.attempt, request.router_id)
        self.over[request.request_id] = self.kept[request.request_id] = running
        offset = running.request.num_generated + len(running.made)
        why = failure_of(RequestDetached("the fake drains"))
        entry = self._ended(running, offset, why)
        self._queue(running.router_id).put_nowait([entry, entry])  # told twice: it counts once
        return decode_pb2.DetachResponse()

    async def HandOff(self, request: Any, context: Any) -> AsyncIterator[Any]:
        order = hand_off_order_from_wire(request)
        self.moved.append(order)
        await self.meet(Moment(FaultStage.HAND_OFF))
        kept = self.kept.get(order.context.request_id)
        if kept is None:
            raise LeaseLost("the fake keeps nothing of it")
        made = [*kept.request.token_ids.tolist(), *kept.made]
        assert order.request.token_ids.tolist() == made, "all tokens that the router was told"
        shorter = without_last(order, PAGE_SIZE)
        yield hand_off_progress_to_wire(PrefillQueued())
        yield hand_off_progress_to_wire(PrefillAdmitted(kept.usage))
        async with channel(order.decode.address) as to_decode:
            stub = decode_pb2_grpc.DecodeServiceStub(to_decode)
            with typed_errors():
                reserved = await stub.Reserve(
                    reserve_order_to_wire(reserve_order(shorter, self)), timeout=120
                )
                first = Sampled(made[-1], {})
                commit = CommitOrder(
                    order.context,
                    reserved.reservation_id,
                    reserved.epoch,
                    (),
                    (),
                    first,
                    kept.usage,
                )
                await stub.Commit(commit_order_to_wire(commit), timeout=120)
        del self.kept[order.context.request_id]
        yield hand_off_progress_to_wire(PrefillHandedOff(kept.usage, 1024, 0.001))

    async def until_aborted(self, request_id: str) -> str:
        """Waits for the router's word; returns the cause."""

        def causes() -> list[str]:
            return [cause for rid, _, cause in self.aborted if rid == request_id]

        async with self.aborts, asyncio.timeout(120):
            await self.aborts.wait_for(causes)
        return causes()[0]

    async def Tokens(self, request: Any, context: Any) -> AsyncIterator[Any]:
        if request.worker_epoch != self.epoch:
            raise Stale("another epoch")
        await context.send_initial_metadata(())
        queue = self._queue(request.router_id)
        sequence = 0
        for cursor in map(cursor_from_wire, request.resume):
            known = self.running.get(cursor.request_id) or self.over.get(cursor.request_id)
            if known is not None and known.attempt == cursor.attempt:
                self.resumed_offsets.append(cursor.offset)
                base, made = known.request.num_generated, known.made
                entries = [
                    self._entry(known, offset)
                    for offset in range(max(base, cursor.offset), base + len(made))
                ]
                queue.put_nowait(entries)
        while True:
            entries = await queue.get()
            for entry in entries:
                await self.meet(Moment(FaultStage.STREAM, offset=entry.frame.offset))
            sequence += 1
            yield decode_pb2.TokensResponse(
                epoch=self.epoch, sequence=sequence, requests=map(request_tokens_to_wire, entries)
            )

    def _queue(self, router_id: str) -> asyncio.Queue[list[RequestTokens]]:
        return self.out.setdefault(router_id, asyncio.Queue())

    async def _decode(self, running: RunningFake) -> None:
        request_id, base = running.request.request_id, running.request.num_generated
        while self.running.get(request_id) is running and not self.dead.is_set():
            if running.made:
                await self.meet(Moment(FaultStage.NEXT_TOKEN))
                if self.running.get(request_id) is not running:
                    return
            offset = base + len(running.made)
            max_tokens = running.request.sampling.max_tokens
            try:
                await self.meet(Moment(FaultStage.TOKEN, offset=offset, max_tokens=max_tokens))
            except GivenUp as given_up:
                self._give_up(running, offset, given_up.ending)
                return
            running.made.append(self.script[offset % len(self.script)])
            entry = self._entry(running, offset)
            if not isinstance(entry.ending, StreamContinues):
                self.over[request_id] = self.running.pop(request_id)
            self._send(running.router_id, entry)
            await asyncio.sleep(0)

    def _give_up(self, running: RunningFake, offset: int, ending: Ending) -> None:
        request_id = running.request.request_id
        self.over[request_id] = self.running.pop(request_id)
        self._queue(running.router_id).put_nowait([self._ended(running, offset, ending)])

    def _ended(self, running: RunningFake, offset: int, ending: Ending) -> RequestTokens:
        """An end without a token, behind those before `offset`."""
        made = [self.script[index % len(self.script)] for index in range(offset)]
        frame = TokenFrame(running.attempt, offset, (), extend_hash(EMPTY_HASH, made))
        return RequestTokens(running.request.request_id, frame, (), ending)

    def _send(self, router_id: str, entry: RequestTokens) -> None:
        entries = [entry]
        for fault in self.faults:
            entries = [sent for each in entries for sent in fault.sent(self, each)]
        for sent in entries:
            self._queue(router_id).put_nowait([sent])

    def _entry(self, running: RunningFake, offset: int) -> RequestTokens:
        """The token at `offset`, and the end when it is the last."""
        script, params = self.script, running.request.sampling
        token_id = script[offset % len(script)]
        made = [script[index % len(script)] for index in range(offset + 1)]
        frame = TokenFrame(running.attempt, offset, (token_id,), extend_hash(EMPTY_HASH, made))
        usage = replace(running.usage, completion_tokens=offset + 1)
        is_first = offset == running.request.num_generated
        ending: Ending = StreamContinues(self.holds) if is_first else StreamContinues()
        if token_id in running.request.stop_token_ids:
            ending = StreamFinished(FinishReason.STOP, usage)
        elif offset + 1 >= params.max_tokens:
            ending = StreamFinished(FinishReason.LENGTH, usage)
        logprobs = ({token_id: -0.25, token_id + 1: -1.5},) if params.logprobs else ()
        return RequestTokens(running.request.request_id, frame, logprobs, ending)
