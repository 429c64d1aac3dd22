"""Units from prefill to decode through memory that decode lent: for processes of one machine.

    writer      units as they become ready → a free frame of the memory → LandPages says where
    receiver    pieces, each checked → the sink of `grpc_plane.py`, which fences and copies

Only decode writes into slots, in the tick in which it checks the fence: a writer that is late, or
was stopped, or lies, spoils nothing but its own memory. Decode takes digests of what lies in its
slots, not of the memory, which the writer may change meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import grpc.aio
import numpy as np

from ferryman.cache.manifest import Kind
from ferryman.cancellation import ended, finished_in_thread
from ferryman.errors import CorruptState, InvalidRequest, Unreachable
from ferryman.handoff.effects import fence_of
from ferryman.handoff.values import Reservation
from ferryman.wire.codec.pieces import (
    LandedRun,
    WriteHeader,
    header_from_wire,
    header_to_wire,
    pieces_from_wire,
    run_to_wire,
)
from ferryman.wire.handoff.grpc_plane import (
    LOST_STATUS,
    Assembly,
    PageSink,
    Sent,
    ask_what_became_of,
)
from ferryman.wire.handoff.lent_memory import FRAME_BYTES, BorrowedMemory
from ferryman.wire.handoff.outgoing_units import (
    AnyUnit,
    UnitCut,
    UnitDigests,
    frames_of,
    read_cuts,
)
from ferryman.wire.plane_values import MEMORY
from ferryman.wire.v1 import decode_pb2, decode_pb2_grpc

LandCall = grpc.aio.StreamStreamCall[decode_pb2.LandPagesRequest, decode_pb2.LandPagesResponse]


class FrameStore:
    """The frames of borrowed memory; hand-offs that run at the same time share them."""

    def __init__(self, memory: BorrowedMemory) -> None:
        self.memory = memory
        self._free: asyncio.Queue[int] = asyncio.Queue()
        for place in range(0, len(memory.content) - FRAME_BYTES + 1, FRAME_BYTES):
            self._free.put_nowait(place)

    async def take(self) -> int:
        """The place of a frame that nobody uses; waits for one."""
        return await self._free.get()

    def give_back(self, place: int) -> None:
        self._free.put_nowait(place)

    @property
    def num_free(self) -> int:
        return self._free.qsize()


async def send_units_by_memory(
    stub: decode_pb2_grpc.DecodeServiceStub,
    reservation: Reservation,
    header: WriteHeader,
    batches: AsyncIterator[Sequence[AnyUnit]],
    store: FrameStore,
) -> Sent:
    """Writes units as they come, batch by batch; returns when decode has copied them all.

    Raises as `grpc_plane.send_units`. It ends only when no thread of it fills a frame or reads a
    slot any more.
    """
    call = stub.LandPages()
    landing = _Landing(call, store)
    answers = asyncio.ensure_future(landing.hear())
    try:
        with suppress(asyncio.InvalidStateError):  # decode has ended it; the status has the reason
            await landing.write(header, batches, answers)
        num_copied = await answers
    except grpc.aio.AioRpcError as error:
        if error.details() != LOST_STATUS:
            raise
        await ask_what_became_of(stub, fence_of(reservation))
        raise Unreachable("the stream to decode broke") from error
    finally:
        call.cancel()  # it has ended already, or nobody waits for it
        answers.cancel()
        await asyncio.wait((answers,))
        await landing.end()
        if not answers.cancelled():
            answers.exception()  # it was raised above, or another error was first
    if num_copied != landing.num_bytes:
        raise CorruptState(f"{landing.num_bytes} bytes were lent, {num_copied} were copied")
    return Sent(tuple(landing.hashers.digests), landing.num_bytes, MEMORY)


@dataclass(slots=True)
class _Landing:
    """One stream of frames: those that decode has yet to copy, the oldest first."""

    call: LandCall
    store: FrameStore
    hashers: UnitDigests = field(default_factory=UnitDigests)
    num_bytes: int = 0
    _under_way: deque[int] = field(default_factory=deque)
    _sending: asyncio.Future[None] | None = None

    async def write(
        self,
        header: WriteHeader,
        batches: AsyncIterator[Sequence[AnyUnit]],
        answers: asyncio.Future[int],
    ) -> None:
        """Returns early once decode has ended the stream: `answers` has its reason."""
        key = self.store.memory.key
        await self._send(decode_pb2.LandPagesRequest(header=header_to_wire(header), key=key))
        async for batch in batches:
            for cuts in frames_of(batch, FRAME_BYTES):
                place = await self._place(answers)
                if place is None:
                    return
                await finished_in_thread(partial(self._fill, cuts, place))
                self.num_bytes += sum(cut.num_bytes for cut in cuts)
                runs = [run_to_wire(run) for run in _runs(cuts, place)]
                await self._send(decode_pb2.LandPagesRequest(pieces=runs))
        await self._sent()
        await self.call.done_writing()

    async def _send(self, request: decode_pb2.LandPagesRequest) -> None:
        """Begins to send, once the message before has left: the next frame is filled meanwhile."""
        await self._sent()
        self._sending = asyncio.ensure_future(self.call.write(request))

    async def _sent(self) -> None:
        """Waits until the last message has left; raises as its write did."""
        if self._sending is not None:
            await self._sending

    async def _place(self, answers: asyncio.Future[int]) -> int | None:
        """A free frame; None if decode ends the stream before one is free."""
        taking = asyncio.ensure_future(self.store.take())
        try:
            await asyncio.wait((taking, answers), return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Also for a caller that is cancelled at this very moment: a frame that was taken is in
            # the list of those that are given back.
            if taking.done():
                self._under_way.append(taking.result())
            else:
                taking.cancel()
        return None if answers.done() else self._under_way[-1]

    def _fill(self, cuts: Sequence[UnitCut], place: int) -> None:
        """Runs in a thread, which waits for memory, or a card, and not for the interpreter."""
        frame = np.frombuffer(self.store.memory.content, np.uint8)[place:]

        def take(cut: UnitCut, offset: int, piece: memoryview) -> None:
            begin = cut.place + offset
            np.copyto(frame[begin : begin + len(piece)], np.frombuffer(piece, np.uint8))
            # Behind the copy, which brought these bytes near the processor.
            self.hashers.add(cut, offset, piece)

        read_cuts(cuts, take)

    async def hear(self) -> int:
        """Gives frames back as decode has copied them; returns the bytes that it counted."""
        num_copied = 0
        async for answer in self.call:
            num_copied = answer.bytes_received
            if self._under_way:
                self.store.give_back(self._under_way.popleft())
        return num_copied

    async def end(self) -> None:
        """Stops sending, and gives all frames back."""
        try:
            if self._sending is not None:
                # A call that is cancelled before it has begun would keep its message for ever.
                self._sending.cancel()
                await ended(self._sending)
                if not self._sending.cancelled():
                    self._sending.exception()  # the status of the call has the reason
        finally:
            while self._under_way:
                self.store.give_back(self._under_way.popleft())


def _runs(cuts: Sequence[UnitCut], place: int) -> Iterator[LandedRun]:
    """Whole units that follow each other become one run."""
    run: LandedRun | None = None
    size = 0
    for cut in cuts:
        unit = cut.unit.unit
        follows = (
            run is not None
            and cut.is_whole
            and cut.num_bytes == size
            and (unit.kind, unit.index) == (run.kind, run.first + len(run.generations))
        )
        if run is not None and follows:
            run.generations.append(unit.slot_generation)
            run.num_bytes += size
            continue
        if run is not None:
            yield run
        size = cut.num_bytes if cut.is_whole else 0
        generations = [unit.slot_generation]
        run = LandedRun(
            unit.kind, unit.index, generations, cut.offset, place + cut.place, cut.num_bytes
        )
    if run is not None:
        yield run


async def receive_landed(
    requests: AsyncIterator[decode_pb2.LandPagesRequest],
    unit_bytes: Mapping[Kind, int],
    sink: PageSink,
    memory_of: Callable[[bytes], memoryview],
) -> AsyncGenerator[int, None]:
    """Passes a LandPages stream to the sink; yields behind each frame the bytes copied so far.

    `memory_of` gives a key's memory, or raises. InvalidRequest as `grpc_plane.receive_pages`.
    """
    assembly = Assembly(unit_bytes)
    header: WriteHeader | None = None
    memory = memoryview(b"")
    async for request in requests:
        if request.HasField("header") is not (header is None):
            raise InvalidRequest("the header is in the first frame and in no other", "header")
        if header is None:
            header = header_from_wire(request.header)
            sink.begin(header)
            memory = memory_of(request.key)
        if not request.pieces:
            continue
        if sum(run.num_bytes for run in request.pieces) > FRAME_BYTES:
            raise InvalidRequest(f"a frame has at most {FRAME_BYTES} bytes", "pieces")
        for run in request.pieces:
            for piece in pieces_from_wire(run, memory, unit_bytes):
                is_last = assembly.accept(piece)
                sink.write(header.fence, piece)
                if is_last:
                    sink.finish(header.fence, piece.unit)
        yield assembly.num_bytes
    if header is None:
        raise InvalidRequest("the stream has no header", "header")
    assembly.finish()
