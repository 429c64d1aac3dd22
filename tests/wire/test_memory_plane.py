"""Units arrive through memory that was lent over a real socket, and nothing odd gets through."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import xxhash
from tests.waiting import until
from tests.wire.arrived_units import PAGE, RESERVATION, STATE, ArrivedUnits

from ferryman.cache.manifest import Kind
from ferryman.errors import CorruptState, InvalidRequest, LeaseLost, Unavailable
from ferryman.handoff.effects import WriteFence, WriterId
from ferryman.handoff.values import WantedUnit
from ferryman.runtime.background import Background
from ferryman.runtime.life import alongside
from ferryman.wire.codec.pieces import WriteHeader, header_to_wire
from ferryman.wire.grpc.rpc import Context, channel, listening
from ferryman.wire.grpc.status import typed_errors
from ferryman.wire.handoff.borrowed_memories import BorrowedMemories
from ferryman.wire.handoff.grpc_plane import Sent
from ferryman.wire.handoff.lent_memory import (
    FRAME_BYTES,
    LENT_BYTES,
    LentMemory,
    borrow,
    hand_out,
    open_socket,
    place_of,
    short_path,
    socket_name,
    sweep_sockets,
)
from ferryman.wire.handoff.memory_lender import MemoryLender
from ferryman.wire.handoff.memory_plane import (
    FrameStore,
    _Landing,
    receive_landed,
    send_units_by_memory,
)
from ferryman.wire.handoff.outgoing_units import OutgoingUnit, UnitDigests
from ferryman.wire.plane_values import GrpcOnly, MemoryGrant, MemoryOffer
from ferryman.wire.v1 import decode_pb2, decode_pb2_grpc, types_pb2

SIZES = {Kind.FULL: 3000, Kind.RECURRENT: 2 * FRAME_BYTES + 5}
FAILSAFE_SECONDS = 60
NUM_FRAMES = LENT_BYTES // FRAME_BYTES
FENCE = WriteFence(77, "res-1", 2)
HEADER = WriteHeader(FENCE, "req-1", "digest")
WRITER = WriterId("prefill-1", 5)


class LendingDecode(decode_pb2_grpc.DecodeServiceServicer):
    """A decode worker that lends memory and receives, and may miscount."""

    def __init__(self, lender: MemoryLender) -> None:
        self.lender, self.sink, self.miscount = lender, ArrivedUnits(), 0

    async def Renew(
        self, request: decode_pb2.RenewRequest, context: Context
    ) -> decode_pb2.RenewResponse:
        if self.sink.refusal:
            raise self.sink.refusal
        return decode_pb2.RenewResponse(lease_ms=1000)

    async def LandPages(
        self, requests: AsyncIterator[decode_pb2.LandPagesRequest], context: Context
    ) -> AsyncIterator[decode_pb2.LandPagesResponse]:
        landed = receive_landed(requests, SIZES, self.sink, self.lender.memory_of)
        async for num_bytes in landed:
            yield decode_pb2.LandPagesResponse(bytes_received=num_bytes + self.miscount)


@dataclass(frozen=True, slots=True)
class Lending:
    """Both sides of one loan, in this process."""

    folder: Path
    decode: LendingDecode
    stub: decode_pb2_grpc.DecodeServiceStub
    store: FrameStore

    async def send(self, units: AsyncIterator[Sequence[OutgoingUnit]]) -> Sent:
        with typed_errors():
            return await send_units_by_memory(self.stub, RESERVATION, HEADER, units, self.store)


@asynccontextmanager
async def lender_in(folder: Path, worker_id: str = "decode-1") -> AsyncIterator[MemoryLender]:
    async with Background() as background:
        lender = MemoryLender(folder, socket_name(worker_id, 7), background)
        async with alongside(lender.run()):
            await until(lambda: bool(lender.place))
            yield lender


@pytest_asyncio.fixture
async def lending(tmp_path: Path) -> AsyncIterator[Lending]:
    """At its end every frame is free again."""
    async with lender_in(tmp_path) as lender:
        decode = LendingDecode(lender)

        def register(server: object) -> None:
            decode_pb2_grpc.add_DecodeServiceServicer_to_server(decode, server)

        async with (
            listening("127.0.0.1:0", register, grace=0) as server,
            channel(f"127.0.0.1:{server.port}") as connection,
        ):
            grant = lender.grant(WRITER, MemoryOffer(place_of(tmp_path)))
            assert isinstance(grant, MemoryGrant)
            with closing(BorrowedMemories(tmp_path)) as memories:
                store = await memories.of(grant)
                stub = decode_pb2_grpc.DecodeServiceStub(connection)
                yield Lending(tmp_path, decode, stub, store)
                assert store.num_free == NUM_FRAMES


def filled(unit: WantedUnit) -> OutgoingUnit:
    size = SIZES[unit.kind]
    pattern = bytes((unit.index + place) % 251 for place in range(251))
    return OutgoingUnit(unit, memoryview((pattern * (size // 251 + 1))[:size]))


async def at_once(units: Iterable[OutgoingUnit]) -> AsyncIterator[Sequence[OutgoingUnit]]:
    yield tuple(units)


async def test_units_arrive_byte_for_byte_with_their_digests(lending: Lending) -> None:
    """More bytes than the memory has, and runs with a gap and with another kind in them."""
    pages = [WantedUnit(Kind.FULL, page, page + 1) for page in range(900) if page != 17]
    states = [replace(STATE, index=index) for index in range(4)]
    units = [filled(unit) for unit in (*pages, *states)]
    assert sum(len(unit.content) for unit in units) > LENT_BYTES
    sent = await lending.send(at_once(units))
    sink = lending.decode.sink
    assert sink.headers == [HEADER]
    assert sink.finished == [unit.unit for unit in units]
    for unit, digest in zip(units, sent.digests, strict=True):
        assert sink.content[unit.unit] == unit.content
        assert digest.name == unit.unit.name
        assert digest.digest == xxhash.xxh3_128_digest(unit.content)
    assert sent.num_bytes == sum(len(unit.content) for unit in units)
    assert sent.path == "memory"


async def test_hand_offs_at_the_same_time_share_the_memory(lending: Lending) -> None:
    groups = [
        [filled(WantedUnit(Kind.RECURRENT, nth * 10 + index, 1)) for index in range(3)]
        for nth in range(4)
    ]
    sent = await asyncio.gather(*(lending.send(at_once(units)) for units in groups))
    for units, one in zip(groups, sent, strict=True):
        for unit, digest in zip(units, one.digests, strict=True):
            assert lending.decode.sink.content[unit.unit] == unit.content
            assert digest.name == unit.unit.name


async def test_a_frame_is_filled_while_the_message_before_leaves(
    lending: Lending, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_filled, may_leave = 0, asyncio.Event()
    call = lending.stub.LandPages()
    call.cancel()
    fill, write = _Landing._fill, type(call).write

    def counted(landing: _Landing, *of_frame: Any) -> None:
        nonlocal num_filled
        fill(landing, *of_frame)
        num_filled += 1

    async def held(landing_call: Any, request: decode_pb2.LandPagesRequest) -> None:
        if request.pieces:
            await may_leave.wait()
        await write(landing_call, request)

    monkeypatch.setattr(_Landing, "_fill", counted)
    monkeypatch.setattr(type(call), "write", held)
    sending = asyncio.ensure_future(lending.send(at_once([filled(STATE)])))  # three frames
    await until(lambda: num_filled == 2)
    assert not lending.decode.sink.content
    may_leave.set()
    assert (await sending).num_bytes == SIZES[Kind.RECURRENT]


async def test_a_ready_unit_does_not_wait_for_the_next(lending: Lending) -> None:
    async def slowly() -> AsyncIterator[Sequence[OutgoingUnit]]:
        yield [filled(PAGE)]
        await until(lambda: PAGE in lending.decode.sink.content)
        yield [filled(STATE)]

    sent = await lending.send(slowly())
    assert [digest.name for digest in sent.digests] == [PAGE.name, STATE.name]


async def test_a_refusal_in_the_middle_reaches_the_sender(lending: Lending) -> None:
    lending.decode.sink.refusal = LeaseLost("too late")

    async def many() -> AsyncIterator[Sequence[OutgoingUnit]]:
        while True:
            yield [filled(STATE)]

    with pytest.raises(LeaseLost, match="too late"):
        await lending.send(many())


async def test_a_sender_that_fails_ends_the_stream(lending: Lending) -> None:
    async def failing() -> AsyncIterator[Sequence[OutgoingUnit]]:
        yield [filled(PAGE)]
        raise InvalidRequest("the prompt is gone")

    with pytest.raises(InvalidRequest, match="the prompt is gone"):
        await lending.send(failing())


async def test_a_cancelled_sender_leaves_nothing_behind(lending: Lending) -> None:
    async def waiting() -> AsyncIterator[Sequence[OutgoingUnit]]:
        yield [filled(PAGE)]
        await asyncio.Event().wait()

    sending = asyncio.ensure_future(lending.send(waiting()))
    await until(lambda: PAGE in lending.decode.sink.content)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending


@pytest.mark.parametrize("num_ticks", range(8))
async def test_a_sender_cancelled_as_a_frame_becomes_free_gives_it_back(
    lending: Lending, num_ticks: int
) -> None:
    taken = [await lending.store.take() for _ in range(NUM_FRAMES)]
    sending = asyncio.ensure_future(lending.send(at_once([filled(PAGE)])))
    await until(lambda: bool(lending.decode.sink.headers))
    lending.store.give_back(taken.pop())
    for _ in range(num_ticks):
        await asyncio.sleep(0)
    sending.cancel()
    await asyncio.wait([sending])
    while taken:
        lending.store.give_back(taken.pop())


async def test_a_frame_goes_back_when_its_thread_has_ended_however_often_its_sender_is_cancelled(
    lending: Lending, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_filling, may_end = threading.Event(), threading.Event()
    add = UnitDigests.add

    def slow(digests: UnitDigests, *of_cut: Any) -> None:
        is_filling.set()
        assert may_end.wait(FAILSAFE_SECONDS)
        add(digests, *of_cut)

    monkeypatch.setattr(UnitDigests, "add", slow)
    sending = asyncio.ensure_future(lending.send(at_once([filled(PAGE)])))
    assert await asyncio.to_thread(is_filling.wait, FAILSAFE_SECONDS)
    for _ in range(3):
        sending.cancel()
        await asyncio.wait([sending], timeout=0)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not sending.done()
        assert lending.store.num_free == NUM_FRAMES - 1
    may_end.set()
    await asyncio.wait([sending])
    assert lending.store.num_free == NUM_FRAMES


async def test_bytes_that_got_lost_are_noticed(lending: Lending) -> None:
    lending.decode.miscount = -1
    with pytest.raises(CorruptState, match="bytes were lent"):
        await lending.send(at_once([filled(PAGE)]))


async def test_memory_of_another_key_is_nobody_s(lending: Lending) -> None:
    with pytest.raises(LeaseLost, match="no memory of this key"):
        lending.decode.lender.memory_of(bytes(32))


# Frames of a writer that is wrong, or worse.


def run(
    num_units: int = 1, *, offset: int = 0, place: int = 0, num_bytes: int = 3000
) -> decode_pb2.LandedPiece:
    return decode_pb2.LandedPiece(
        kind=types_pb2.KIND_FULL,
        page_index=1,
        generations=[1] * num_units,
        offset=offset,
        place=place,
        num_bytes=num_bytes,
    )


def frame(
    *pieces: decode_pb2.LandedPiece, with_header: bool = False
) -> decode_pb2.LandPagesRequest:
    header = header_to_wire(HEADER) if with_header else None
    return decode_pb2.LandPagesRequest(header=header, pieces=pieces)


FIRST = frame(with_header=True)


@pytest.mark.parametrize(
    ("frames", "complaint"),
    [
        ([], "no header"),
        ([frame(run())], "header is in the first frame"),
        ([FIRST, FIRST], "header is in the first frame"),
        ([FIRST, frame(run(place=LENT_BYTES - 2999))], "is no part of"),
        ([FIRST, frame(run(place=1 << 63))], "is no part of"),
        ([FIRST, frame(run(0))], "not 0 whole units"),
        ([FIRST, frame(run(2, num_bytes=5999))], "not 2 whole units"),
        ([FIRST, frame(run(2, offset=1, num_bytes=6000))], "not 2 whole units"),
        ([FIRST, frame(run(2, num_bytes=3000))], "not 2 whole units of 3000 bytes"),
        ([FIRST, frame(run(3000, num_bytes=3000))], "not 3000 whole units of 3000 bytes"),
        ([FIRST, frame(run(2, num_bytes=0))], "not 2 whole units"),
        ([FIRST, frame(run(num_bytes=6000))], "is no part of full unit 1 of 3000"),
        ([FIRST, frame(run(num_bytes=0))], "is no part of full unit"),
        ([FIRST, frame(run(offset=5))], "goes on at 0, not 5"),
        ([FIRST, frame(run(num_bytes=2999))], "is not complete"),
        ([FIRST, frame(*[run(num_bytes=3000)] * 1400)], "a frame has at most"),
    ],
)
async def test_an_odd_stream_is_refused(
    frames: list[decode_pb2.LandPagesRequest], complaint: str
) -> None:
    async def requests() -> AsyncIterator[decode_pb2.LandPagesRequest]:
        for each in frames:
            yield each

    memory = memoryview(bytes(LENT_BYTES))
    with pytest.raises(InvalidRequest, match=complaint):
        async for _ in receive_landed(requests(), SIZES, ArrivedUnits(), lambda _key: memory):
            pass


# The loan.


def granted(lender: MemoryLender, folder: Path, writer: WriterId = WRITER) -> MemoryGrant:
    grant = lender.grant(writer, MemoryOffer(place_of(folder)))
    assert isinstance(grant, MemoryGrant)
    return grant


def sockets_in(folder: Path) -> list[Path]:
    return list(folder.glob("*.sock"))


async def refused(folder: Path, grant: MemoryGrant) -> str:
    with pytest.raises(Unavailable) as caught:
        await asyncio.to_thread(borrow, folder, grant)
    return str(caught.value)


async def test_a_ticket_counts_once_and_another_never(tmp_path: Path) -> None:
    async with lender_in(tmp_path) as lender:
        grant = granted(lender, tmp_path)
        assert granted(lender, tmp_path) == grant, "a life of a writer has one memory"
        assert "does not know" in await refused(tmp_path, replace(grant, ticket=bytes(32)))
        memory = await asyncio.to_thread(borrow, tmp_path, grant)
        assert "does not know" in await refused(tmp_path, grant)
        assert lender.statistics().refused == 2
        memory.content[:4] = b"mine"
        assert bytes(lender.memory_of(memory.key)[:4]) == b"mine"
        memory.close()
        await until(lambda: not lender.statistics().lent)
        with pytest.raises(LeaseLost):
            lender.memory_of(memory.key)
        assert granted(lender, tmp_path).ticket != grant.ticket


async def test_writers_elsewhere_and_lenders_that_do_not_listen_use_grpc(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    async with lender_in(tmp_path) as lender:
        far = lender.grant(WRITER, MemoryOffer(place_of(other)))
        assert far == GrpcOnly("the workers share no folder of one machine")
        folded = tmp_path / "other" / ".." / "other"
        assert place_of(folded) == place_of(other), "another path of the same folder"
    gone = lender.grant(WRITER, MemoryOffer(place_of(tmp_path)))
    assert isinstance(gone, GrpcOnly)
    assert not sockets_in(tmp_path)


BORROWER = """
import sys; from pathlib import Path
from ferryman.wire.handoff.lent_memory import borrow, place_of
from ferryman.wire.plane_values import MemoryGrant
folder, name, ticket, size = sys.argv[1:]
memory = borrow(Path(folder), MemoryGrant(name, bytes.fromhex(ticket), int(size)))
memory.content[:5] = b"hello"
print(memory.key.hex(), place_of(Path(folder)), flush=True); sys.stdin.read()
"""


@asynccontextmanager
async def borrower(
    folder: Path, grant: MemoryGrant, *inside: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, list[str]]]:
    """A process that has borrowed, and its words; `inside` is a command to run it elsewhere."""
    words = [str(folder), grant.socket, grant.ticket.hex(), str(grant.num_bytes)]
    command = [*inside, sys.executable, "-c", BORROWER, *words]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    try:
        assert process.stdout is not None
        yield process, (await process.stdout.readline()).decode().split()
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_a_writer_keeps_the_memory_of_each_lender_that_lives(tmp_path: Path) -> None:
    """Where another one is fetched it drops those whose lenders are gone, and asks without
    waiting."""
    offer = MemoryOffer(place_of(tmp_path))
    with closing(BorrowedMemories(tmp_path)) as memories:
        async with lender_in(tmp_path) as first:
            async with lender_in(tmp_path, "decode-2") as gone:
                of_first, of_gone = (one.grant(WRITER, offer) for one in (first, gone))
                assert isinstance(of_first, MemoryGrant)
                assert isinstance(of_gone, MemoryGrant)
                kept, over = await memories.of(of_first), await memories.of(of_gone)
                assert not kept.memory.is_over
                assert not over.memory.is_over
                assert first.memory_of(kept.memory.key)
            await until(lambda: over.memory.is_over)
            async with lender_in(tmp_path, "decode-3") as third:
                of_third = third.grant(WRITER, offer)
                assert isinstance(of_third, MemoryGrant)
                await memories.of(of_third)
                assert await memories.of(of_first) is kept
                assert first.memory_of(kept.memory.key)
                assert first.statistics().lent == third.statistics().lent == 1
        await until(lambda: kept.memory.is_over)


async def test_a_loan_ends_with_the_process_of_its_writer(tmp_path: Path) -> None:
    """Also one that stands still: it keeps its memory, and nothing else."""
    async with lender_in(tmp_path) as lender:
        async with borrower(tmp_path, granted(lender, tmp_path)) as (writer, (key, _)):
            assert bytes(lender.memory_of(bytes.fromhex(key))[:5]) == b"hello"
            os.kill(writer.pid, signal.SIGSTOP)
            assert lender.statistics().lent == 1
        await until(lambda: not lender.statistics().lent)


APART = ("unshare", "--mount", "--pid", "--net", "--ipc", "--fork", "--kill-child")


def skip_unless_it_runs(command: Sequence[str]) -> None:
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("no namespaces here")


async def test_a_container_with_the_folder_as_a_volume_borrows_too(tmp_path: Path) -> None:
    """Another mount, under another path, and namespaces of its own for processes and networks."""
    folder, volume = tmp_path / "host", tmp_path / "volume"
    folder.mkdir()
    volume.mkdir()
    mounting = f"mount --bind {folder} {volume} && exec "
    await asyncio.to_thread(skip_unless_it_runs, [*APART, "sh", "-c", f"{mounting} true"])
    async with lender_in(folder) as lender:
        grant = granted(lender, folder)
        inside = (*APART, "sh", "-c", f'{mounting} "$@"', "sh")
        async with borrower(volume, grant, *inside) as (_, (key, place)):
            assert place == lender.place
            assert bytes(lender.memory_of(bytes.fromhex(key))[:5]) == b"hello"


async def test_a_crowd_that_shows_nothing_does_not_keep_a_writer_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ferryman.wire.handoff.memory_lender.BORROW_SECONDS", 0.1)
    async with lender_in(tmp_path) as lender:
        crowd = [socket.socket(socket.AF_UNIX) for _ in range(70)]
        try:
            with short_path(tmp_path, socket_name("decode-1", 7)) as path:
                for stranger in crowd:
                    await asyncio.to_thread(stranger.connect, path)
            memory = await asyncio.to_thread(borrow, tmp_path, granted(lender, tmp_path))
            memory.close()
        finally:
            for stranger in crowd:
                stranger.close()


async def test_only_its_owner_reaches_the_socket(tmp_path: Path) -> None:
    async with lender_in(tmp_path):
        (path,) = sockets_in(tmp_path)
        assert path.stat().st_mode & 0o777 == 0o600


async def test_sockets_of_dead_lenders_are_swept_and_those_of_living_ones_stay(
    tmp_path: Path,
) -> None:
    stale = open_socket(tmp_path, socket_name("decode-0", 1))
    stale.close()
    async with lender_in(tmp_path) as lender:
        assert [path.name for path in sockets_in(tmp_path)] == [socket_name("decode-1", 7)]
        assert await asyncio.to_thread(sweep_sockets, tmp_path) == ()
        memory = await asyncio.to_thread(borrow, tmp_path, granted(lender, tmp_path))
        memory.close()
        assert lender.statistics().refused == 0, "a look is no attack"


def test_a_socket_that_cannot_get_its_name_leaves_nothing(tmp_path: Path) -> None:
    name = socket_name("decode-0", 1)
    (tmp_path / name).mkdir()
    with pytest.raises(IsADirectoryError):
        open_socket(tmp_path, name)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_socket_of_a_lender_that_died_before_it_had_its_name_is_swept(tmp_path: Path) -> None:
    drafts = [tmp_path / f".{socket_name('decode-0', number)}" for number in (1, 2)]
    for path in drafts:
        with socket.socket(socket.AF_UNIX) as dead, short_path(tmp_path, path.name) as short:
            dead.bind(short)
    os.utime(drafts[0], (0, 0))
    assert sweep_sockets(tmp_path) == (drafts[0],)
    assert drafts[1].exists(), "its process may be about to listen"


@pytest.mark.parametrize("name", ["../x.sock", "/run/docker.sock", "ferryman-lender-a/b.sock", ""])
def test_a_grant_names_no_socket_outside_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(Unavailable, match="no name of a lender's socket"):
        borrow(tmp_path, MemoryGrant(name, bytes(32), LENT_BYTES))


class ShrinkableMemory(LentMemory):
    """Memory that its lender could take away under the borrower: a SIGBUS."""

    def __init__(self) -> None:
        self.key = bytes(32)
        self.descriptor = os.memfd_create("shrinkable", os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, LENT_BYTES)


def small_memory() -> LentMemory:
    return LentMemory(LENT_BYTES // 2)


@pytest.mark.parametrize("make", [ShrinkableMemory, small_memory])
async def test_a_writer_takes_no_memory_that_could_vanish(
    tmp_path: Path, make: Callable[[], LentMemory]
) -> None:
    memory, name = make(), socket_name("decode-9", 1)
    with open_socket(tmp_path, name) as listening:
        listening.setblocking(True)

        def hand_over() -> None:
            connection, _ = listening.accept()
            with connection, suppress(OSError):
                connection.recv(32)
                hand_out(connection, memory)
                connection.recv(1)

        handing = asyncio.create_task(asyncio.to_thread(hand_over))
        said = await refused(tmp_path, MemoryGrant(name, bytes(32), LENT_BYTES))
        await handing
    assert "does not keep a size" in said
    memory.close()


def test_the_size_of_lent_memory_is_for_ever() -> None:
    memory = LentMemory()
    for size in (0, LENT_BYTES // 2, 2 * LENT_BYTES):
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(memory.descriptor, size)
    memory.close()
