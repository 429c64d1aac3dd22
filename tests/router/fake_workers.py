"""Prefill and decode workers without an engine: real servers, real messages, planned tokens.

The i-th generated token of every request is `SCRIPT[i % len(SCRIPT)]`, whichever attempt and
worker it comes from, as with a real model and one seed. Faults are set before, and counted when
they take effect, so that a test can assert that they did.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc.aio

from ferryman.cache.manifest import Kind
from ferryman.errors import Exhausted, OutOfSlots, Stale, Unavailable
from ferryman.handoff.offsets import EMPTY_HASH, TokenFrame, extend_hash
from ferryman.handoff.usage import CachedTokens
from ferryman.ids import make_epoch, make_worker_id
from ferryman.schedule.batch import Sampled
from ferryman.schedule.request import FinishReason, Request
from ferryman.wire.beats import Beat, ServedState, beat_to_bytes
from ferryman.wire.bus import Bus, Message
from ferryman.wire.codec.caches import CacheSnapshot, cache_snapshot_to_bytes
from ferryman.wire.codec.handoff import (
    abort_order_from_wire,
    commit_order_from_wire,
    commit_order_to_wire,
    reserve_order_from_wire,
    reserve_order_to_wire,
)
from ferryman.wire.codec.prefill import prefill_order_from_wire, progress_to_wire
from ferryman.wire.codec.tokens import cursor_from_wire, step_frame_to_wire
from ferryman.wire.rpc import channel, listening
from ferryman.wire.status import typed_errors
from ferryman.wire.subjects import Subjects
from ferryman.wire.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2_grpc
from ferryman.wire.values import (
    Admitted,
    ChunkDone,
    CommitOrder,
    Ending,
    Finished,
    GoesOn,
    HandedOff,
    PlanSummary,
    PrefillOrder,
    Queued,
    RequestTokens,
    ReserveOrder,
    StepFrame,
    UncachedPages,
    Usage,
    WorkerAddress,
)

PAGE_SIZE = 16
STATE = ServedState("f" * 32, PAGE_SIZE, "d" * 32, (Kind.FULL, Kind.RECURRENT))
BEAT_SECONDS = 0.2
MAX_LEN = 512


@dataclass
class Faults:
    """What goes wrong. `happened` counts what did; `gate` holds tokens back until it is set,
    `last_word` what prefill says behind its commit."""

    refuse_reserve: int = 0
    refuse_prefill: int = 0
    die_before_commit: bool = False
    die_after_tokens: int | None = None
    drop_offsets: set[int] = field(default_factory=set)
    duplicate: bool = False
    break_stream_at: int | None = None
    gate: asyncio.Event | None = None
    last_word: asyncio.Event | None = None
    happened: Counter[str] = field(default_factory=Counter)


class FakeWorker:
    """What both roles share: an address, an epoch, beats, and a way to die."""

    role = ""

    def __init__(self, script: tuple[int, ...], worker_id: str = "") -> None:
        self.script = script
        self.worker_id = worker_id or make_worker_id(self.role)
        self.epoch = make_epoch()
        self.faults = Faults()
        self.address = ""
        self.is_ready = True
        self.node = ""
        self.seconds_per_token = 0.0
        self.dead = asyncio.Event()

    @property
    def beat(self) -> Beat:
        return Beat(
            self.role,
            self.worker_id,
            self.epoch,
            self.address,
            self.is_ready,
            STATE,
            MAX_LEN,
            node=self.node,
            seconds_per_token=self.seconds_per_token,
        )

    def register(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError

    def die(self, fault: str) -> None:
        """As by SIGKILL: connections break, beats end."""
        self.faults.happened[fault] += 1
        self.dead.set()

    async def live(self, bus: Bus, subjects: Subjects, up: asyncio.Event) -> None:
        """Serves and beats until it dies or is cancelled."""
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(
                listening("127.0.0.1:0", self.register, grace=0)
            )
            self.address = f"127.0.0.1:{server.port}"
            control = subjects.control(self.worker_id, "snapshot")
            await stack.enter_async_context(bus.answering(control, self._snapshot))
            up.set()
            while not self.dead.is_set():
                bus.offer(subjects.beat(self.role, self.worker_id), beat_to_bytes(self.beat))
                try:
                    async with asyncio.timeout(BEAT_SECONDS):
                        await self.dead.wait()
                except TimeoutError:
                    continue

    async def _snapshot(self, message: Message) -> bytes:
        return cache_snapshot_to_bytes(CacheSnapshot(self.worker_id, self.epoch, 0, {}))


@dataclass
class Running:
    """One request at a decode worker."""

    request: Request
    attempt: int
    router_id: str
    usage: Usage
    made: list[int] = field(default_factory=list)


class FakeDecode(FakeWorker, decode_pb2_grpc.DecodeServiceServicer):
    """Reserves, commits, streams; `aborted` records what it was told to give up."""

    role = "decode"

    def __init__(self, script: tuple[int, ...], worker_id: str = "") -> None:
        super().__init__(script, worker_id)
        self.reserved: dict[str, ReserveOrder] = {}
        self.running: dict[str, Running] = {}
        self.over: dict[str, Running] = {}
        self.aborted: list[tuple[str, int, str]] = []
        self.aborts = asyncio.Condition()
        self.out: dict[str, asyncio.Queue[list[RequestTokens]]] = {}
        self.resumed_offsets: list[int] = []
        self.jobs: set[asyncio.Task[None]] = set()

    def register(self, server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, server)

    async def Reserve(self, request: Any, context: Any) -> decode_pb2.ReserveResponse:
        order = reserve_order_from_wire(request)
        if self.faults.refuse_reserve:
            self.faults.refuse_reserve -= 1
            self.faults.happened["refuse_reserve"] += 1
            raise OutOfSlots("no slots in the fake", 0.05)
        reservation_id = f"res-{order.context.request_id}-{order.context.attempt}"
        self.reserved[reservation_id] = order
        return decode_pb2.ReserveResponse(reservation_id=reservation_id, epoch=self.epoch)

    async def Commit(self, request: Any, context: Any) -> decode_pb2.CommitResponse:
        commit = commit_order_from_wire(request)
        if self.faults.die_before_commit:
            self.die("die_before_commit")
            await asyncio.Event().wait()
        order = self.reserved.pop(commit.reservation_id, None)
        if order is None:
            raise Stale("no such reservation")
        running = Running(order.request, order.context.attempt, order.router_id, commit.usage)
        self.running[order.context.request_id] = running
        job = asyncio.get_running_loop().create_task(self._decode(running))
        self.jobs.add(job)
        job.add_done_callback(self.jobs.discard)
        return decode_pb2.CommitResponse(accepted_tokens=1)

    async def Abort(self, request: Any, context: Any) -> decode_pb2.AbortResponse:
        order = abort_order_from_wire(request)
        was_known = self.running.pop(order.request_id, None) is not None
        async with self.aborts:
            self.aborted.append((order.request_id, order.attempt, order.cause))
            self.aborts.notify_all()
        return decode_pb2.AbortResponse(was_known=was_known)

    async def until_aborted(self, request_id: str) -> str:
        """Waits for the router's word; returns the cause."""

        def causes() -> list[str]:
            return [cause for rid, _, cause in self.aborted if rid == request_id]

        async with self.aborts, asyncio.timeout(10):
            await self.aborts.wait_for(causes)
        return causes()[0]

    async def Tokens(self, request: Any, context: Any) -> AsyncIterator[Any]:
        if request.worker_epoch != self.epoch:
            raise Stale("another epoch")
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
                if entry.frame.offset == self.faults.break_stream_at:
                    self.faults.break_stream_at = None
                    self.faults.happened["break_stream"] += 1
                    raise Unavailable("the fake breaks its stream")
            sequence += 1
            yield step_frame_to_wire(StepFrame(self.epoch, sequence, tuple(entries)))

    def _queue(self, router_id: str) -> asyncio.Queue[list[RequestTokens]]:
        return self.out.setdefault(router_id, asyncio.Queue())

    async def _decode(self, running: Running) -> None:
        request_id, base = running.request.request_id, running.request.num_generated
        while self.running.get(request_id) is running and not self.dead.is_set():
            if self.faults.gate is not None and running.made:
                self.faults.happened["gate"] += 1
                await self.faults.gate.wait()
                if self.running.get(request_id) is not running:
                    return
            offset = base + len(running.made)
            if self.faults.die_after_tokens == offset:
                self.die("die_after_tokens")
                return
            running.made.append(self.script[offset % len(self.script)])
            entry = self._entry(running, offset)
            if not isinstance(entry.ending, GoesOn):
                self.over[request_id] = self.running.pop(request_id)
            self._send(running.router_id, entry, offset)
            await asyncio.sleep(0)

    def _send(self, router_id: str, entry: RequestTokens, offset: int) -> None:
        if offset in self.faults.drop_offsets:
            self.faults.drop_offsets.discard(offset)
            self.faults.happened["drop"] += 1
            return
        self._queue(router_id).put_nowait([entry])
        if self.faults.duplicate:
            self.faults.happened["duplicate"] += 1
            self._queue(router_id).put_nowait([entry])

    def _entry(self, running: Running, offset: int) -> RequestTokens:
        """The token at `offset`, and the end when it is the last."""
        script, params = self.script, running.request.sampling
        token_id = script[offset % len(script)]
        made = [script[index % len(script)] for index in range(offset + 1)]
        frame = TokenFrame(running.attempt, offset, (token_id,), extend_hash(EMPTY_HASH, made))
        usage = replace(running.usage, completion_tokens=offset + 1)
        ending: Ending = GoesOn()
        if token_id in running.request.stop_token_ids:
            ending = Finished(FinishReason.STOP, usage)
        elif offset + 1 >= params.max_tokens:
            ending = Finished(FinishReason.LENGTH, usage)
        logprobs = ({token_id: -0.25, token_id + 1: -1.5},) if params.logprobs else ()
        return RequestTokens(running.request.request_id, frame, logprobs, ending)


class FakePrefill(FakeWorker, prefill_pb2_grpc.PrefillServiceServicer):
    """Reserves at decode, computes nothing, commits. `orders` are what it was sent, `ends` says
    how they ended here."""

    role = "prefill"

    def __init__(self, script: tuple[int, ...], worker_id: str = "") -> None:
        super().__init__(script, worker_id)
        self.orders: list[PrefillOrder] = []
        self.num_cancelled = 0
        self.ends: asyncio.Queue[str] = asyncio.Queue()

    def register(self, server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, server)

    async def Prefill(self, request: Any, context: Any) -> AsyncIterator[Any]:
        order = prefill_order_from_wire(request)
        self.orders.append(order)
        try:
            async for progress in self._progress(order):
                yield progress_to_wire(progress)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            self.ends.put_nowait("cancelled")
            raise
        self.ends.put_nowait("handed_off")

    async def _progress(self, order: PrefillOrder) -> AsyncIterator[Any]:
        if self.faults.refuse_prefill:
            self.faults.refuse_prefill -= 1
            self.faults.happened["refuse_prefill"] += 1
            raise Exhausted("no room in the fake", 0.05)
        yield Queued(0)
        usage = _usage(order)
        async with channel(order.decode.address) as to_decode:
            stub = decode_pb2_grpc.DecodeServiceStub(to_decode)
            with typed_errors():
                reserve = _reserve(order, self)
                reserved = await stub.Reserve(reserve_order_to_wire(reserve), timeout=5)
            yield Admitted(_plan(order))
            if self.faults.gate is not None:
                self.faults.happened["gate"] += 1
                await self.faults.gate.wait()
            if self.faults.die_before_commit:
                self.die("die_before_commit")
                await asyncio.Event().wait()
            yield ChunkDone(1, 1, 0, len(order.request.token_ids))
            first = Sampled(self.script[order.request.num_generated % len(self.script)], {})
            with typed_errors():
                commit = CommitOrder(
                    order.context, reserved.reservation_id, reserved.epoch, (), (), first, usage
                )
                await stub.Commit(commit_order_to_wire(commit), timeout=5)
        if self.faults.last_word is not None:
            self.faults.happened["last_word"] += 1
            await self.faults.last_word.wait()
        yield HandedOff(reserved.reservation_id, first, usage, 1024, 0.001)


def _usage(order: PrefillOrder) -> Usage:
    """As if the first page had been cached on the device, when there is more than one."""
    prompt_len = len(order.request.token_ids)
    cached = PAGE_SIZE if prompt_len > PAGE_SIZE else 0
    pages = -(-prompt_len // PAGE_SIZE) - cached // PAGE_SIZE
    uncached = (UncachedPages("never_seen", pages),)
    return Usage(prompt_len, 0, CachedTokens(device=cached), uncached)


def _plan(order: PrefillOrder) -> PlanSummary:
    usage = _usage(order)
    return PlanSummary(
        position=usage.cached.total,
        prompt_len=usage.prompt_tokens,
        recurrent="copy" if usage.cached.total else "clear",
        kinds=(),
        uncached=usage.uncached,
        snapshots=(),
        cached=usage.cached,
    )


def _reserve(order: PrefillOrder, writer: FakePrefill) -> ReserveOrder:
    return ReserveOrder(
        order.context,
        order.decode.epoch,
        WorkerAddress(writer.worker_id, writer.address, writer.epoch),
        order.router_id,
        order.request,
        order.manifest_digest,
        "",
    )


@asynccontextmanager
async def living(worker: FakeWorker, bus: Bus, subjects: Subjects) -> AsyncIterator[None]:
    """The worker serves while the block runs, unless it dies before."""
    up = asyncio.Event()
    task = asyncio.get_running_loop().create_task(worker.live(bus, subjects, up))
    try:
        await up.wait()
        yield
    finally:
        worker.dead.set()
        await task
