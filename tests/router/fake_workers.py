"""Prefill and decode workers without an engine: real servers, real messages, planned tokens.

The i-th generated token of every request is `SCRIPT[i % len(SCRIPT)]`, whichever attempt and
worker it comes from, as with a real model and one seed. Faults are set before, and counted when
they take effect, so that a test can assert that they did.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc.aio
from tests.doubles.fake_engine import fake_scores

from ferryman.cache.manifest import Kind
from ferryman.errors import (
    DeadlineExceeded,
    Exhausted,
    LeaseLost,
    NotFound,
    OutOfSlots,
    RequestDetached,
    RequestIdInUse,
    Stale,
    Unavailable,
    WrongEpoch,
)
from ferryman.handoff.offsets import EMPTY_HASH, TokenFrame, extend_hash
from ferryman.handoff.usage import CachedTokens
from ferryman.ids import make_epoch, make_life_secret, worker_id_of
from ferryman.schedule.batch import Sampled
from ferryman.schedule.prompt_scores import PromptScores, ScoreRequest
from ferryman.schedule.request import FinishReason, Request
from ferryman.wire.codec.caches import CacheSnapshot, cache_snapshot_to_bytes
from ferryman.wire.codec.handoff import (
    abort_order_from_wire,
    commit_order_from_wire,
    commit_order_to_wire,
    hand_off_order_from_wire,
    hand_off_progress_to_wire,
    reserve_order_from_wire,
    reserve_order_to_wire,
)
from ferryman.wire.codec.prefill import prefill_order_from_wire, progress_to_wire
from ferryman.wire.codec.tokens import cursor_from_wire, request_tokens_to_wire
from ferryman.wire.grpc.rpc import channel, listening
from ferryman.wire.grpc.status import failure_of, typed_errors
from ferryman.wire.nats.bus import Bus, BusMessage
from ferryman.wire.nats.heartbeat import Heartbeat, ServedState, beat_to_bytes
from ferryman.wire.nats.subjects import Subjects
from ferryman.wire.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2_grpc
from ferryman.wire.values import (
    CommitOrder,
    Ending,
    PrefillAdmitted,
    PrefillChunkDone,
    PrefillHandedOff,
    PrefillOrder,
    PrefillQueued,
    RequestTokens,
    ReserveOrder,
    RouterAbort,
    StreamContinues,
    StreamFinished,
    UncachedPages,
    Usage,
    WorkerAddress,
)
from ferryman_decode.departure import without_last

PAGE_SIZE = 16
STATE = ServedState("f" * 32, PAGE_SIZE, "d" * 32, (Kind.FULL, Kind.RECURRENT))
BEAT_SECONDS = 0.2
MAX_LEN = 512


@dataclass
class Faults:
    """The faults of a worker. `happened` counts what did; `gate` holds tokens back until it is set,
    `last_word` what prefill says behind its commit. At the offset `give_up_at` decode ends a
    request unasked, with the ending `give_up_as`: once, or always. `hand_off_error` is what a
    draining worker answers to the order to hand a request off, once. `attempts_in_use`, as
    `ID.NUMBER`, are those of another router. A request of `dies_of` tokens kills decode behind its
    first one."""

    refuse_reserve: int = 0
    refuse_prefill: int = 0
    time_out: int = 0
    die_before_commit: bool = False
    die_after_tokens: int | None = None
    dies_of: int = 0
    drop_offsets: set[int] = field(default_factory=set)
    duplicate: bool = False
    break_stream_at: int | None = None
    give_up_at: int | None = None
    give_up_as: Ending = field(default_factory=StreamContinues)
    gives_up_always: bool = False
    fail_behind_commit: bool = False
    spoil_scores: Callable[[list[PromptScores]], list[PromptScores]] | None = None
    die_behind_scores: bool = False
    scores_behind_commit: bool = False
    refuse_detach: int = 0
    hand_off_error: Exception | None = None
    die_of_hand_off: bool = False
    attempts_in_use: frozenset[str] = frozenset()
    gate: asyncio.Event | None = None
    last_word: asyncio.Event | None = None
    happened: Counter[str] = field(default_factory=Counter)


class FakeRouterWorker:
    """The base of both roles: an address, an epoch, beats, and a way to die."""

    role = ""

    def __init__(self, script: tuple[int, ...], worker_id: str = "") -> None:
        self.script = script
        self.worker_id = worker_id or worker_id_of(self.role, make_life_secret())
        self.epoch = make_epoch()
        self.faults = Faults()
        self.address = ""
        self.is_ready = True
        self.is_silent = False
        self.state = STATE
        self.node = ""
        self.seconds_per_token = 0.0
        self.start_seconds = 0.05
        self.max_running = 64
        self.dead = asyncio.Event()

    @property
    def beat(self) -> Heartbeat:
        return Heartbeat(
            self.role,
            self.worker_id,
            self.epoch,
            self.address,
            self.is_ready,
            self.state,
            MAX_LEN,
            max_running=self.max_running,
            node=self.node,
            seconds_per_token=self.seconds_per_token,
            start_seconds=self.start_seconds,
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
                listening("127.0.0.1:0", self.register, grace=0, worker_id=self.worker_id)
            )
            self.address = f"127.0.0.1:{server.port}"
            control = subjects.control(self.worker_id, "snapshot")
            await stack.enter_async_context(bus.answering(control, self._snapshot))
            up.set()
            while not self.dead.is_set():
                if not self.is_silent:
                    bus.offer(subjects.beat(self.role, self.worker_id), beat_to_bytes(self.beat))
                try:
                    async with asyncio.timeout(BEAT_SECONDS):
                        await self.dead.wait()
                except TimeoutError:
                    continue

    async def _snapshot(self, message: BusMessage) -> bytes:
        return cache_snapshot_to_bytes(CacheSnapshot(self.worker_id, self.epoch, 0, {}))


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
        return decode_pb2.AbortResponse(was_known=was_known)

    async def Detach(self, request: Any, context: Any) -> decode_pb2.DetachResponse:
        if self.faults.refuse_detach:
            self.faults.refuse_detach -= 1
            self.faults.happened["refuse_detach"] += 1
            raise NotFound("the fake does not find it")
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
        if (error := self.faults.hand_off_error) is not None:
            self.faults.hand_off_error = None
            self.faults.happened["hand_off_error"] += 1
            raise error
        if self.faults.die_of_hand_off:
            self.die("die_of_hand_off")
            await asyncio.Event().wait()
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
                    reserve_order_to_wire(_reserve(shorter, self)), timeout=120
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
                if entry.frame.offset == self.faults.break_stream_at:
                    self.faults.break_stream_at = None
                    self.faults.happened["break_stream"] += 1
                    raise Unavailable("the fake breaks its stream")
            sequence += 1
            yield decode_pb2.TokensResponse(
                epoch=self.epoch, sequence=sequence, requests=map(request_tokens_to_wire, entries)
            )

    def _queue(self, router_id: str) -> asyncio.Queue[list[RequestTokens]]:
        return self.out.setdefault(router_id, asyncio.Queue())

    async def _decode(self, running: RunningFake) -> None:
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
            if offset == 1 and self.faults.dies_of == running.request.sampling.max_tokens:
                self.die("dies_of")
                return
            if self.faults.give_up_at == offset:
                self._give_up(running, offset)
                return
            running.made.append(self.script[offset % len(self.script)])
            entry = self._entry(running, offset)
            if not isinstance(entry.ending, StreamContinues):
                self.over[request_id] = self.running.pop(request_id)
            self._send(running.router_id, entry, offset)
            await asyncio.sleep(0)

    def _give_up(self, running: RunningFake, offset: int) -> None:
        if not self.faults.gives_up_always:
            self.faults.give_up_at = None
        self.faults.happened["give_up"] += 1
        request_id = running.request.request_id
        self.over[request_id] = self.running.pop(request_id)
        entry = self._ended(running, offset, self.faults.give_up_as)
        self._queue(running.router_id).put_nowait([entry])

    def _ended(self, running: RunningFake, offset: int, ending: Ending) -> RequestTokens:
        """An end without a token, behind those before `offset`."""
        made = [self.script[index % len(self.script)] for index in range(offset)]
        frame = TokenFrame(running.attempt, offset, (), extend_hash(EMPTY_HASH, made))
        return RequestTokens(running.request.request_id, frame, (), ending)

    def _send(self, router_id: str, entry: RequestTokens, offset: int) -> None:
        if offset in self.faults.drop_offsets:
            self.faults.drop_offsets.discard(offset)
            self.faults.happened["drop"] += 1
            return
        self._queue(router_id).put_nowait([entry])
        if self.faults.duplicate:
            self.faults.happened["duplicate"] += 1
            self._queue(router_id).put_nowait([entry])

    def _entry(self, running: RunningFake, offset: int) -> RequestTokens:
        """The token at `offset`, and the end when it is the last."""
        script, params = self.script, running.request.sampling
        token_id = script[offset % len(script)]
        made = [script[index % len(script)] for index in range(offset + 1)]
        frame = TokenFrame(running.attempt, offset, (token_id,), extend_hash(EMPTY_HASH, made))
        usage = replace(running.usage, completion_tokens=offset + 1)
        ending: Ending = StreamContinues()
        if token_id in running.request.stop_token_ids:
            ending = StreamFinished(FinishReason.STOP, usage)
        elif offset + 1 >= params.max_tokens:
            ending = StreamFinished(FinishReason.LENGTH, usage)
        logprobs = ({token_id: -0.25, token_id + 1: -1.5},) if params.logprobs else ()
        return RequestTokens(running.request.request_id, frame, logprobs, ending)


class FakePrefill(FakeRouterWorker, prefill_pb2_grpc.PrefillServiceServicer):
    """Reserves at decode, computes nothing, commits. `orders` are what it was sent, `ends` says
    how they ended here."""

    role = "prefill"

    def __init__(self, script: tuple[int, ...], worker_id: str = "") -> None:
        super().__init__(script, worker_id)
        self.orders: list[PrefillOrder] = []
        self.ends: asyncio.Queue[str] = asyncio.Queue()

    def register(self, server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, server)

    async def Prefill(self, request: Any, context: Any) -> AsyncIterator[Any]:
        order = prefill_order_from_wire(request)
        self.orders.append(order)
        if order.worker_epoch != self.epoch:
            self.faults.happened["wrong_epoch"] += 1
            raise WrongEpoch("another life of this fake was meant")
        name = f"{order.context.request_id}.{order.context.attempt}"
        if name in self.faults.attempts_in_use:
            self.faults.happened["in_use"] += 1
            raise RequestIdInUse("the fake has one of another router")
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
        if self.faults.refuse_prefill:
            self.faults.refuse_prefill -= 1
            self.faults.happened["refuse_prefill"] += 1
            raise Exhausted("no room in the fake", 0.05)
        yield PrefillQueued()
        usage = _usage(order)
        async with channel(order.decode.address) as to_decode:
            stub = decode_pb2_grpc.DecodeServiceStub(to_decode)
            with typed_errors():
                reserve = _reserve(order, self)
                reserved = await stub.Reserve(reserve_order_to_wire(reserve), timeout=120)
            if self.faults.time_out:
                self.faults.time_out -= 1
                self.faults.happened["time_out"] += 1
                raise DeadlineExceeded("a call of the fake took too long")
            yield PrefillAdmitted(usage)
            scores = self._scores(order)
            if not self.faults.scores_behind_commit:
                for piece in scores:
                    yield piece
            if self.faults.die_behind_scores:
                self.die("die_behind_scores")
                await asyncio.Event().wait()
            if self.faults.gate is not None:
                self.faults.happened["gate"] += 1
                await self.faults.gate.wait()
            if self.faults.die_before_commit:
                self.die("die_before_commit")
                await asyncio.Event().wait()
            yield PrefillChunkDone(len(order.request.token_ids))
            first = Sampled(self.script[order.request.num_generated % len(self.script)], {})
            with typed_errors():
                commit = CommitOrder(
                    order.context, reserved.reservation_id, reserved.epoch, (), (), first, usage
                )
                await stub.Commit(commit_order_to_wire(commit), timeout=120)
        if self.faults.last_word is not None:
            self.faults.happened["last_word"] += 1
            await self.faults.last_word.wait()
        if self.faults.scores_behind_commit:
            self.faults.happened["scores_behind_commit"] += 1
            for piece in scores:
                yield piece
        if self.faults.fail_behind_commit:
            self.faults.happened["fail_behind_commit"] += 1
            raise Unavailable("the fake has not heard what became of its commit")
        yield PrefillHandedOff(usage, 1024, 0.001)

    def _scores(self, order: PrefillOrder) -> list[PromptScores]:
        """As the fake engine's, in pieces of four tokens at most."""
        num_best = order.request.prompt_logprobs
        if num_best is None or order.request.prompt_len == 1:
            return []
        wanted = ScoreRequest(1, order.request.token_ids[1:], num_best)
        pieces = list(fake_scores(wanted).pieces(4 * (1 + num_best)))
        if self.faults.spoil_scores is None:
            return pieces
        self.faults.happened["spoil_scores"] += 1
        return self.faults.spoil_scores(pieces)


def _usage(order: PrefillOrder) -> Usage:
    """As if the first page had been cached on the device, when there is more than one."""
    prompt_len = len(order.request.token_ids)
    cached = PAGE_SIZE if prompt_len > PAGE_SIZE else 0
    pages = -(-prompt_len // PAGE_SIZE) - cached // PAGE_SIZE
    uncached = (UncachedPages("never_seen", pages),)
    return Usage(prompt_len, 0, CachedTokens(device=cached), uncached)


def _reserve(order: PrefillOrder, writer: FakeRouterWorker) -> ReserveOrder:
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
async def living(worker: FakeRouterWorker, bus: Bus, subjects: Subjects) -> AsyncIterator[None]:
    """The worker serves while the block runs, unless it dies before."""
    up = asyncio.Event()
    task = asyncio.get_running_loop().create_task(worker.live(bus, subjects, up))
    try:
        await up.wait()
        yield
    finally:
        worker.dead.set()
        await task
