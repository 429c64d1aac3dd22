"""Bytes in and out of slots; both transfers keep the same promises."""

from __future__ import annotations

from threading import Thread

import numpy as np
import pytest
import torch
import xxhash
from tests.doubles.stamps import StampSlabs, fake_manifest

from ferryman.cache.manifest import Kind
from ferryman.engine.memory import transfer as transfer_module
from ferryman.engine.memory.copy_stream import CopyFence, CopyRun, HostSide
from ferryman.engine.memory.slabs import Slabs
from ferryman.engine.memory.transfer import (
    ONE_PIECE_BYTES,
    PIECE_BYTES,
    DeviceTransfer,
    HostTransfer,
    ReadBuffers,
    Transfer,
    copied,
    digest_of,
    pinned_or_plain,
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


class SlowSide(HostSide):
    """Copies that have ended only after a wait for them."""

    def __init__(self) -> None:
        self.waits: list[int] = []
        self._runs = 0

    def begin(self) -> CopyRun:
        self._runs += 1
        return _SlowRun(self, self._runs)


class _SlowRun:
    def __init__(self, side: SlowSide, number: int) -> None:
        self._side, self._number = side, number

    def end(self) -> CopyFence:
        return self

    def wait(self) -> None:
        """The queue's business."""

    def finish(self) -> None:
        self._side.waits.append(self._number)

    def seconds(self) -> float:
        return 0.0


def test_a_pinned_buffer_is_filled_again_only_when_its_last_copy_has_ended() -> None:
    side = SlowSide()
    transfer = DeviceTransfer(Slabs.allocate(MANIFEST, SIZES, "cpu"), side, HostSide())
    for slot, waited in enumerate([[], [], [1], [1, 2]]):
        transfer.load_unit(Kind.FULL, slot, memoryview(CONTENT), digest_of(CONTENT))
        assert side.waits == waited
    assert all(bytes(transfer.read(Kind.FULL, slot)) == CONTENT for slot in range(4))


class LoggedSide(HostSide):
    """Says when each run of copies begins and ends; `meanwhile` runs once, before the first end."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.meanwhile = Thread()
        self._runs = 0

    def begin(self) -> CopyRun:
        self._runs += 1
        self.log.append(f"{self._runs} begins")
        return _LoggedRun(self, self._runs)


class _LoggedRun:
    def __init__(self, side: LoggedSide, number: int) -> None:
        self._side, self._number = side, number

    def end(self) -> CopyFence:
        return self

    def wait(self) -> None:
        """The queue's business."""

    def finish(self) -> None:
        if not self._side.meanwhile.ident:
            self._side.meanwhile.start()
            self._side.meanwhile.join(0.2)  # ends at once where it waits for nothing
        self._side.log.append(f"{self._number} ends")

    def seconds(self) -> float:
        return 0.0


def test_a_card_fills_one_piece_while_the_other_one_is_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer_module, "LANDING_BYTES", 48)
    monkeypatch.setattr(transfer_module, "PIECE_BYTES", 20)
    side, arena = LoggedSide(), bytearray(len(CONTENT) + 2)
    transfer = DeviceTransfer(Slabs.allocate(MANIFEST, SIZES, "cpu"), HostSide(), side)
    transfer.load_unit(Kind.FULL, 1, memoryview(CONTENT), digest_of(CONTENT))
    digest = transfer.store_unit(Kind.FULL, 1, memoryview(arena)[1:-1])
    assert (digest, bytes(arena)) == (digest_of(CONTENT), b"\0" + CONTENT + b"\0")
    assert side.log == ["1 begins", "2 begins", "1 ends", "3 begins", "2 ends", "3 ends"]


def test_two_units_do_not_leave_by_the_same_pieces_at_once() -> None:
    side, arenas = LoggedSide(), [memoryview(bytearray(len(CONTENT))) for _ in range(2)]
    transfer = DeviceTransfer(Slabs.allocate(MANIFEST, SIZES, "cpu"), HostSide(), side)
    for slot, arena in enumerate(arenas):
        content = bytes([slot]) * len(arena)
        transfer.load_unit(Kind.FULL, slot, memoryview(content), digest_of(content))
    side.meanwhile = Thread(target=transfer.store_unit, args=(Kind.FULL, 1, arenas[1]))
    transfer.store_unit(Kind.FULL, 0, arenas[0])
    side.meanwhile.join()
    assert [set(arena) for arena in arenas] == [{0}, {1}]
    assert side.log == ["1 begins", "1 ends", "2 begins", "2 ends"]


def test_reads_of_a_card_take_memory_that_earlier_readers_have_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []

    def counted(num_bytes: int, *, is_pinned: bool) -> torch.Tensor:
        made.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    monkeypatch.setattr(transfer_module, "_host_memory", counted)
    monkeypatch.setattr(transfer_module, "READ_BYTES", 3 * len(CONTENT))
    transfer = DeviceTransfer(Slabs.allocate(MANIFEST, SIZES, "cpu"), HostSide(), HostSide())
    for slot in range(4):
        transfer.write(Kind.FULL, slot, 0, bytes([slot]) * len(CONTENT))
    made.clear()
    for slot in (0, 1, 2, 3):
        assert set(transfer.read(Kind.FULL, slot)) == {slot}
    assert made == [len(CONTENT)], "each was left before the next read"
    kept = [transfer.read(Kind.FULL, slot)[1:] for slot in (0, 1, 2, 3)]
    assert made == [len(CONTENT)] * 3, "the fourth has memory of its own"
    again = np.frombuffer(kept.pop(1), np.uint8)
    assert set(transfer.read(Kind.FULL, 3)) == {3}
    assert set(again) == {1}, "a view of a view still holds its buffer"
    assert [set(content) for content in kept] == [{0}, {2}, {3}]


def test_a_machine_that_pins_no_more_memory_reads_loads_and_writes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pinned: list[int] = []

    def refused(num_bytes: int, *, is_pinned: bool) -> torch.Tensor:
        if not is_pinned:
            return torch.empty(num_bytes, dtype=torch.uint8)
        pinned.append(num_bytes)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(transfer_module, "_host_memory", refused)
    buffers = ReadBuffers(8, is_pinned=True)
    assert [len(buffers.lent()) for _ in range(3)] == [8, 8, 8]
    assert pinned == [8], "it is not asked again"
    assert len(pinned_or_plain(48, is_pinned=True)) == 48
    assert caplog.text.count("no pinned memory") == 2


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
