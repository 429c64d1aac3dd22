"""NIXL behind its wrapper: bytes land where they were sent, and what ended says so."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.waiting import until

from ferryman.errors import Unavailable
from ferryman.wire.handoff.nixl_agent import POLL_SECONDS, NixlAgent, next_pause, nixl_agent
from ferryman.wire.handoff.nixl_library import MemoryRegion, WriteRun, _Write, has_nixl, merged_runs

needs_nixl = pytest.mark.skipif(not has_nixl(), reason="ferryman[nixl] is not installed")
NUM_BYTES = 1 << 20
Bytes = NDArray[np.uint8]


class Side:
    """Memory and the agent that may touch it."""

    def __init__(self, memory: Bytes, agent: NixlAgent) -> None:
        self.memory, self.agent = memory, agent
        self.address = int(memory.ctypes.data)


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    source = (np.arange(NUM_BYTES) % 251).astype(np.uint8)
    target = np.zeros(NUM_BYTES, np.uint8)
    here, there = (MemoryRegion(int(m.ctypes.data), NUM_BYTES) for m in (source, target))
    with nixl_agent("writer", [here]) as writer, nixl_agent("receiver", [there]) as receiver:
        yield Side(source, writer), Side(target, receiver)


async def landed(writer: Side, peer: str, runs: list[WriteRun]) -> None:
    async with asyncio.timeout(120):
        await asyncio.wrap_future(writer.agent.write(peer, runs))


@needs_nixl
async def test_runs_land_in_their_places_and_nowhere_else(sides: tuple[Side, Side]) -> None:
    writer, receiver = sides
    peer = await writer.agent.add_peer(receiver.agent.metadata)
    runs = [
        WriteRun(writer.address, receiver.address + 4096, 1000),
        WriteRun(writer.address + 5000, receiver.address + 9000, 7),
    ]
    with receiver.agent.listening():
        await landed(writer, peer, runs)
    expected = np.zeros(NUM_BYTES, np.uint8)
    expected[4096:5096] = writer.memory[:1000]
    expected[9000:9007] = writer.memory[5000:5007]
    assert (receiver.memory == expected).all()


@needs_nixl
async def test_what_is_said_is_heard_once(sides: tuple[Side, Side]) -> None:
    writer, receiver = sides
    peer = await writer.agent.add_peer(receiver.agent.metadata)
    with receiver.agent.listening():
        async with asyncio.timeout(120):
            for message in (b"one", b"two"):
                waiting = asyncio.create_task(receiver.agent.notifications())
                await asyncio.sleep(0)
                assert not waiting.done(), "there is nothing yet, or it was heard already"
                writer.agent.tell(peer, message)
                assert await waiting == [message]


@needs_nixl
async def test_a_caller_that_left_takes_no_message_along(sides: tuple[Side, Side]) -> None:
    writer, receiver = sides
    peer = await writer.agent.add_peer(receiver.agent.metadata)
    with receiver.agent.listening():
        async with asyncio.timeout(120):
            leaving = asyncio.create_task(receiver.agent.notifications())
            await until(lambda: receiver.agent._wanted is not None)
            leaving.cancel()
            await asyncio.wait((leaving,))
            writer.agent.tell(peer, b"one")
            assert await receiver.agent.notifications() == [b"one"]


def test_pauses_grow_while_nothing_moves_and_are_short_again_when_something_does() -> None:
    shortest, longest = POLL_SECONDS
    pauses = [shortest]
    while pauses[-1] < longest:
        pauses.append(next_pause(pauses[-1], is_moving=False))
    assert len(pauses) < 10
    assert all(before < after for before, after in pairwise(pauses))
    assert next_pause(longest, is_moving=False) == longest
    assert next_pause(longest, is_moving=True) == shortest


@needs_nixl
async def test_memory_that_was_not_registered_is_out_of_reach(sides: tuple[Side, Side]) -> None:
    writer, receiver = sides
    peer = await writer.agent.add_peer(receiver.agent.metadata)
    beyond = WriteRun(writer.address, receiver.address + NUM_BYTES - 8, 16)
    with pytest.raises(Unavailable):
        await landed(writer, peer, [beyond])
    with pytest.raises(Unavailable):
        await writer.agent.add_peer(b"no metadata of anybody")


@needs_nixl
async def test_a_closed_agent_answers_nothing(sides: tuple[Side, Side]) -> None:
    writer, receiver = sides
    receiver.agent.close()
    with pytest.raises(Unavailable, match="closed"):
        await receiver.agent.notifications()
    writer.agent.close()
    with pytest.raises(Unavailable, match="closed"):
        await writer.agent.add_peer(receiver.agent.metadata)
    with pytest.raises(Unavailable, match="closed"):
        writer.agent.write(receiver.agent.name, [WriteRun(0, 0, 1)]).result(timeout=120)


@given(st.lists(st.integers(1, 9), max_size=20), st.data())
def test_merging_moves_the_same_bytes_with_fewer_descriptors(
    sizes: list[int], data: st.DataObject
) -> None:
    units, local, remote = [], 0, 100
    for size in sizes:
        local += data.draw(st.integers(0, 1))
        remote += data.draw(st.integers(0, 1))
        devices = data.draw(st.sampled_from([(-1, -1), (-1, 0), (1, 0)]))
        units.append(WriteRun(local, remote, size, *devices))
        local, remote = local + size, remote + size
    table = np.array(units, np.int64).reshape(-1, 5)
    runs = [WriteRun(*row) for row in merged_runs(table).tolist()]
    assert list(moved_by(runs)) == list(moved_by(units))
    for one, other in pairwise(runs):
        ends = (one.local + one.num_bytes, one.remote + one.num_bytes)
        assert (*ends, one[3:]) != (other.local, other.remote, other[3:])


def moved_by(runs: list[WriteRun]) -> Iterator[tuple[int, ...]]:
    """Each byte: from where to where."""
    for run in runs:
        yield from ((run.local + i, run.remote + i, *run[3:]) for i in range(run.num_bytes))


class OddLibrary:
    """Fails in a way of its own whenever it is asked for notifications."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.num_failed = 0

    def get_new_notifs(self) -> None:
        self.num_failed += 1
        raise RuntimeError("odd")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.library, name)


@needs_nixl
async def test_a_look_that_fails_is_taken_again(sides: tuple[Side, Side]) -> None:
    writer, receiver = sides
    peer = await writer.agent.add_peer(receiver.agent.metadata)
    odd = OddLibrary(receiver.agent._library._agent)
    receiver.agent._library._agent = odd
    with receiver.agent.listening():
        async with asyncio.timeout(120):
            waiting = asyncio.create_task(receiver.agent.notifications())
            await until(lambda: odd.num_failed >= 3)
            receiver.agent._library._agent = odd.library
            writer.agent.tell(peer, b"one")
            assert await waiting == [b"one"]


@needs_nixl
async def test_an_agent_whose_thread_fails_is_closed_and_says_so(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No call waits for a thread that failed, even by an unexpected error."""

    def look() -> bool:
        raise RuntimeError("unheard of")

    agent = sides[1].agent
    monkeypatch.setattr(agent, "_look", look)

    async def hear() -> None:
        while True:
            await agent.notifications()

    with pytest.raises(Unavailable, match="closed"):
        await asyncio.wait_for(hear(), 120)
    agent.close()
    assert "unheard of" in caplog.text


@pytest.mark.parametrize("state", ["DONE", "ERR", "PROC"])
def test_a_write_gives_its_handle_back_once_however_it_ends(state: str) -> None:
    class CountedHandle:
        num_released = 0

        def release(self) -> None:
            self.num_released += 1

    handle, ended = CountedHandle(), Future[None]()
    write = _Write(handle, state, ended)
    if state == "PROC":
        write.give_up()
    else:
        assert write.has_ended(None)
    assert handle.num_released == 1
    assert (ended.exception(timeout=0) is None) == (state == "DONE")


@needs_nixl
def test_an_agent_is_closed_with_its_block() -> None:
    with nixl_agent("short", []) as agent:
        assert agent._thread.is_alive()
    assert not agent._thread.is_alive()


def test_a_write_that_landed_has_landed_though_it_cannot_be_released() -> None:
    class Handle:
        def release(self) -> None:
            raise RuntimeError("odd")

    landed: Future[None] = Future()
    assert _Write(Handle(), "DONE", landed).has_ended(None)
    assert landed.result(timeout=0) is None


@needs_nixl
async def test_who_was_given_no_metadata_writes_nothing(sides: tuple[Side, Side]) -> None:
    """Not even by the name of an agent, and the address of its memory: `Reserve` gives the rest."""
    stranger, receiver = sides
    stolen = WriteRun(stranger.address, receiver.address, NUM_BYTES)
    namesake = np.zeros(NUM_BYTES, np.uint8)
    there = MemoryRegion(int(namesake.ctypes.data), NUM_BYTES)
    with receiver.agent.listening(), nixl_agent("receiver", [there]) as fake:
        with pytest.raises(Unavailable):
            await landed(stranger, "receiver", [stolen])
        peer = await stranger.agent.add_peer(fake.metadata)
        with pytest.raises(Unavailable):
            await landed(stranger, peer, [stolen])
        assert not receiver.memory.any()
        await stranger.agent.remove_peer(peer)
        peer = await stranger.agent.add_peer(receiver.agent.metadata)
        await landed(stranger, peer, [stolen])
    assert (receiver.memory == stranger.memory).all(), "with the metadata it does"
