"""Bytes in and out of slots; both transfers keep the same promises."""

from __future__ import annotations

from threading import Thread

import numpy as np
import pytest
import torch
import xxhash
from tests.doubles.fake_card import CountingSide, PinnedMemory
from tests.doubles.stamps import StampSlabs, fake_manifest

from ferryman.cache.manifest import Kind
from ferryman.cache.slots import SlotPart
from ferryman.engine.memory import pinned_pieces
from ferryman.engine.memory import transfer as transfer_module
from ferryman.engine.memory.copy_stream import HostSide
from ferryman.engine.memory.pinned_pieces import LEAVING_BYTES, PinnedPairs, pinned_or_plain
from ferryman.engine.memory.slabs import Slabs
from ferryman.engine.memory.transfer import (
    ONE_PIECE_BYTES,
    PIECE_BYTES,
    DeviceTransfer,
    HostTransfer,
    Transfer,
    copied,
    digest_of,
    transfer_of,
)
from ferryman.errors import CorruptState, InvalidRequest

MANIFEST = fake_manifest(16)
SIZES = {Kind.FULL: 4, Kind.RECURRENT: 3}
CONTENT = bytes(range(128))


def stamps() -> Transfer:
    return HostTransfer(StampSlabs(MANIFEST, SIZES))


def slabs() -> Transfer:
    return transfer_of(Slabs.allocate(MANIFEST, SIZES, "cpu"), HostSide(), HostSide())


def copying() -> Transfer:
    # The accelerator's way runs on any device; here on the one that every machine has.
    return DeviceTransfer(Slabs.allocate(MANIFEST, SIZES, "cpu"), HostSide(), HostSide())


@pytest.fixture(
    params=[
        pytest.param(stamps, id="stamps"),
        pytest.param(slabs, id="host slabs"),
        pytest.param(copying, id="copying"),
    ]
)
def transfer(request: pytest.FixtureRequest) -> Transfer:
    made: Transfer = request.param()
    return made


def test_what_is_written_in_parts_is_read_whole(transfer: Transfer) -> None:
    transfer.write(Kind.FULL, 1, 100, memoryview(CONTENT)[100:])
    transfer.write(Kind.FULL, 1, 0, CONTENT[:100])
    assert bytes(transfer.read(Kind.FULL, 1)) == CONTENT
    assert transfer.digest(Kind.FULL, 1) == xxhash.xxh3_128_digest(CONTENT)


def test_neighbouring_slots_are_left_alone(transfer: Transfer) -> None:
    before = [bytes(transfer.read(Kind.FULL, slot)) for slot in (0, 2)]
    transfer.write(Kind.FULL, 1, 0, CONTENT)
    assert [bytes(transfer.read(Kind.FULL, slot)) for slot in (0, 2)] == before


def test_a_unit_comes_back_from_the_arena_as_it_was(transfer: Transfer) -> None:
    transfer.write(Kind.FULL, 1, 0, CONTENT)
    arena = bytearray(300)
    digest = transfer.store_unit(Kind.FULL, 1, memoryview(arena)[64:192])
    assert arena[64:192] == CONTENT
    transfer.load_unit(Kind.FULL, 3, memoryview(bytes(arena))[64:192], digest)
    assert bytes(transfer.read(Kind.FULL, 3)) == CONTENT


def test_one_flipped_bit_is_corrupt_state(transfer: Transfer) -> None:
    arena = bytearray(128)
    digest = transfer.store_unit(Kind.FULL, 1, memoryview(arena))
    arena[77] ^= 4
    with pytest.raises(CorruptState, match="full slot 3: bytes with digest"):
        transfer.load_unit(Kind.FULL, 3, memoryview(arena), digest)


def test_bytes_that_do_not_fit_are_refused(transfer: Transfer) -> None:
    with pytest.raises(InvalidRequest, match=r"\[1, 129\) do not fit a full slot of 128 bytes"):
        transfer.write(Kind.FULL, 1, 1, CONTENT)
    with pytest.raises(InvalidRequest):
        transfer.write(Kind.FULL, 1, -1, CONTENT[:1])
    with pytest.raises(CorruptState, match="a unit of 64 bytes is no full slot"):
        transfer.store_unit(Kind.FULL, 1, memoryview(bytearray(64)))
    with pytest.raises(IndexError, match="no slot 4"):
        transfer.read(Kind.FULL, 4)
    with pytest.raises(IndexError, match="no slot -1"):
        transfer.write(Kind.FULL, -1, 0, CONTENT)


@pytest.mark.parametrize(
    "num_bytes", [0, 1, ONE_PIECE_BYTES, ONE_PIECE_BYTES + 1, 3 * PIECE_BYTES, 5 * PIECE_BYTES - 7]
)
def test_a_copy_in_pieces_has_the_digest_of_the_whole(num_bytes: int) -> None:
    source = (np.arange(num_bytes, dtype=np.uint32) * 2_654_435_761).view(np.uint8)[:num_bytes]
    target = bytearray(num_bytes)
    assert copied(memoryview(target), source.data) == digest_of(source.tobytes())
    assert target == source.tobytes()


def test_a_pinned_buffer_is_filled_again_only_when_its_last_copy_has_ended() -> None:
    side = CountingSide()
    transfer = DeviceTransfer(Slabs.allocate(MANIFEST, SIZES, "cpu"), side, HostSide())
    for slot, waited in enumerate([[], [], [1], [1, 2]]):
        transfer.load_unit(Kind.FULL, slot, memoryview(CONTENT), digest_of(CONTENT))
        assert side.waits == waited
    assert all(bytes(transfer.read(Kind.FULL, slot)) == CONTENT for slot in range(4))


class InterruptedSide(CountingSide):
    """`meanwhile` runs once, before the first wait is over."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile = Thread()

    def waited_for(self, number: int) -> None:
        if not self.meanwhile.ident:
            self.meanwhile.start()
            self.meanwhile.join(0.2)  # ends at once where it waits for nothing
        super().waited_for(number)


def test_a_card_fills_one_piece_while_the_other_one_is_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pinned_pieces, "LEAVING_BYTES", 48)
    monkeypatch.setattr(transfer_module, "PIECE_BYTES", 20)
    side, arena = CountingSide(), bytearray(len(CONTENT) + 2)
    transfer = DeviceTransfer(Slabs.allocate(MANIFEST, SIZES, "cpu"), HostSide(), side)
    transfer.load_unit(Kind.FULL, 1, memoryview(CONTENT), digest_of(CONTENT))
    digest = transfer.store_unit(Kind.FULL, 1, memoryview(arena)[1:-1])
    assert (digest, bytes(arena)) == (digest_of(CONTENT), b"\0" + CONTENT + b"\0")
    assert side.log == ["1 begins", "2 begins", "1 ends", "3 begins", "2 ends", "3 ends"]


def filled_slots(side: HostSide) -> DeviceTransfer:
    """Each slot's bytes are its number."""
    transfer = DeviceTransfer(Slabs.allocate(MANIFEST, SIZES, "cpu"), HostSide(), side)
    for slot in range(4):
        content = bytes([slot]) * len(CONTENT)
        transfer.load_unit(Kind.FULL, slot, memoryview(content), digest_of(content))
    return transfer


def test_a_reader_waits_for_pieces_in_place_of_memory_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pinned_pieces, "NUM_PAIRS", 1)
    memory = PinnedMemory.counted(monkeypatch)
    side, arenas = InterruptedSide(), [memoryview(bytearray(len(CONTENT))) for _ in range(2)]
    transfer = filled_slots(side)
    memory.sizes.clear()
    side.meanwhile = Thread(target=transfer.store_unit, args=(Kind.FULL, 1, arenas[1]))
    transfer.store_unit(Kind.FULL, 0, arenas[0])
    side.meanwhile.join()
    assert [set(arena) for arena in arenas] == [{0}, {1}]
    assert side.log == ["1 begins", "1 ends", "2 begins", "2 ends"]
    assert memory.sizes == [LEAVING_BYTES] * 2


def test_readers_have_pieces_of_their_own_as_long_as_there_are_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = PinnedMemory.counted(monkeypatch)
    transfer = filled_slots(HostSide())
    memory.sizes.clear()
    inner: list[bytes] = []

    def take(_number: int, _offset: int, piece: memoryview) -> None:
        inner.append(transfer.digest(Kind.FULL, 2))
        assert set(piece) == {1}, "another reader has not written over it"

    transfer.read_parts([SlotPart(Kind.FULL, 1, 0, 128)], take)
    assert inner == [digest_of(bytes([2]) * 128)]
    for slot in range(4):
        transfer.digest(Kind.FULL, slot)
    assert memory.sizes == [LEAVING_BYTES] * 4, "two readers at most at the same time"


def test_small_parts_leave_a_card_in_one_run_and_keep_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pinned_pieces, "LEAVING_BYTES", 100)
    side = CountingSide()
    transfer = filled_slots(side)
    parts = [SlotPart(Kind.FULL, slot, 4 * slot, 4 * slot + 60) for slot in (3, 0, 2)]
    arrived: list[tuple[int, int, bytes]] = []
    transfer.read_parts(parts, lambda *at: arrived.append((at[0], at[1], bytes(at[2]))))
    assert arrived == [
        (0, 0, bytes([3]) * 60),
        (1, 0, bytes(40)),
        (1, 40, bytes(20)),
        (2, 0, bytes([2]) * 60),
    ]
    assert side.log == ["1 begins", "2 begins", "1 ends", "2 ends"]


def test_a_reader_that_fails_gives_its_pieces_back_when_the_card_has_left_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pinned_pieces, "NUM_PAIRS", 1)
    monkeypatch.setattr(pinned_pieces, "LEAVING_BYTES", 48)
    side = CountingSide()
    transfer = filled_slots(side)

    def refuse(*_: object) -> None:
        raise CorruptState("the frame is gone")

    with pytest.raises(CorruptState, match="the frame is gone"):
        transfer.read_parts([SlotPart(Kind.FULL, 1, 0, 128)], refuse)
    assert side.log == ["1 begins", "2 begins", "1 ends", "2 ends"]
    assert transfer.digest(Kind.FULL, 2) == digest_of(bytes([2]) * 128)


def test_written_bytes_are_hashed_where_no_writer_can_change_them(transfer: Transfer) -> None:
    """The writer of lent memory overwrites it as soon as a byte has been copied."""
    lent, landed = bytearray(CONTENT), list[bytes]()

    def changed(piece: memoryview) -> None:
        lent[:] = bytes(len(lent))
        landed.append(bytes(piece))

    transfer.write(Kind.FULL, 1, 0, memoryview(lent), changed)
    assert b"".join(landed) == CONTENT
    assert bytes(transfer.read(Kind.FULL, 1)) == CONTENT


def test_a_machine_that_pins_no_more_memory_reads_and_writes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(num_bytes: int, *, is_pinned: bool) -> torch.Tensor:
        if not is_pinned:
            return torch.empty(num_bytes, dtype=torch.uint8)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(pinned_pieces, "_host_memory", refused)
    pairs, taken = PinnedPairs(HostSide(), is_pinned=True), list[bytes]()
    for _ in range(2):
        pairs.read([torch.arange(8, dtype=torch.uint8)], lambda *at: taken.append(bytes(at[2])))
    assert taken == [bytes(range(8))] * 2
    assert caplog.text.count("no pinned memory") == 2, "once for each of two pieces"
    assert len(pinned_or_plain(48, is_pinned=True)) == 48


def test_what_is_longer_than_the_pinned_memory_is_written_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer_module, "LANDING_BYTES", 48)
    transfer = copying()
    transfer.write(Kind.FULL, 2, 1, CONTENT[1:])
    transfer.write(Kind.FULL, 2, 0, CONTENT[:1])
    assert bytes(transfer.read(Kind.FULL, 2)) == CONTENT


def test_corrupt_bytes_never_reach_an_accelerator() -> None:
    transfer = DeviceTransfer(Slabs.allocate(MANIFEST, SIZES, "cpu"), HostSide(), HostSide())
    before = bytes(transfer.read(Kind.FULL, 1))
    with pytest.raises(CorruptState):
        transfer.load_unit(Kind.FULL, 1, memoryview(CONTENT), bytes(16))
    assert bytes(transfer.read(Kind.FULL, 1)) == before


def test_host_slots_are_read_in_place() -> None:
    host = slabs()
    view = host.read(Kind.FULL, 2)
    host.write(Kind.FULL, 2, 0, CONTENT)
    assert bytes(view) == CONTENT
