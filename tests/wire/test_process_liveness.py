"""A process counts as dead when its kernel says so; silence and other processes are no death."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator

import pytest
from tests.waiting import until

from ferryman.errors import Unavailable
from ferryman.handoff.effects import WriterId
from ferryman.wire.handoff import process_liveness
from ferryman.wire.handoff.process_liveness import (
    LivenessWatch,
    WrongProcess,
    liveness_server,
    watch_process,
)

WHO = WriterId("prefill-1", 7)
ALIVE = """
import asyncio
from ferryman.handoff.effects import WriterId
from ferryman.wire.handoff.process_liveness import liveness_server
async def live():
    async with liveness_server("127.0.0.1", WriterId("prefill-1", 7)) as port:
        print(port, flush=True)
        await asyncio.Event().wait()
asyncio.run(live())
"""


@pytest.fixture
def process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-c", ALIVE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as found:
        assert found.stdout is not None
        yield found, f"127.0.0.1:{int(found.stdout.readline())}"
        found.kill()


async def test_a_killed_process_is_gone_and_a_stopped_one_is_not(
    process: tuple[subprocess.Popen[str], str],
) -> None:
    child, address = process
    seen = await watch_process(address, WHO)
    ended = asyncio.ensure_future(seen.ended())
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(Unavailable, match="nobody says"):
        await watch_process(address, WHO)
    assert not ended.done(), "two seconds of silence are no death"
    child.kill()
    async with asyncio.timeout(120):
        await ended
    child.wait()  # its listening socket outlives its connections by a moment
    with pytest.raises(ConnectionRefusedError):
        await watch_process(address, WHO)
    await seen.close()


async def test_another_life_at_the_same_place_is_somebody_else() -> None:
    async with liveness_server("127.0.0.1", WHO) as port:
        with pytest.raises(WrongProcess):
            await watch_process(f"127.0.0.1:{port}", WriterId("prefill-1", 8))


async def test_a_process_that_leaves_in_good_order_is_gone_too() -> None:
    async with liveness_server("127.0.0.1", WHO) as port:
        seen = await watch_process(f"127.0.0.1:{port}", WHO)
    async with asyncio.timeout(120):
        await seen.ended()
    await seen.close()


NETWORK_FAILED = [errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ECONNABORTED]


@pytest.mark.parametrize("number", NETWORK_FAILED)
async def test_a_network_that_fails_is_no_death_and_the_watch_goes_on(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As often as it fails: the process has to close a connection, or not to be there."""
    monkeypatch.setattr(process_liveness, "AGAIN_SECONDS", 0.01)
    watches: list[LivenessWatch] = []

    async def noted(address: str, who: WriterId) -> LivenessWatch:
        watches.append(await watch_process(address, who))
        return watches[-1]

    monkeypatch.setattr(process_liveness, "watch_process", noted)
    async with liveness_server("127.0.0.1", WHO) as port:
        seen = await noted(f"127.0.0.1:{port}", WHO)
        ended = asyncio.ensure_future(seen.ended())
        seen.reader.set_exception(OSError(number, os.strerror(number)))
        await until(lambda: len(watches) == 2 or ended.done())
        watches[-1].reader.set_exception(OSError(number, os.strerror(number)))
        await until(lambda: len(watches) == 3 or ended.done())
        assert not ended.done(), "it lives"
    async with asyncio.timeout(120):
        await ended
    await seen.close()


@pytest.mark.parametrize("then", [ConnectionRefusedError(), WrongProcess("another lives there")])
async def test_who_cannot_be_reached_may_live_until_nobody_or_another_is_there(
    then: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_liveness, "AGAIN_SECONDS", 0.0)
    lost = OSError(errno.EHOSTUNREACH, "no route to host")
    found = [lost, Unavailable("nobody answers"), lost, then]
    async with liveness_server("127.0.0.1", WHO) as port:
        seen = await watch_process(f"127.0.0.1:{port}", WHO)
        seen.reader.set_exception(lost)

        async def look(_address: str, _who: WriterId) -> LivenessWatch:
            raise found.pop(0)

        monkeypatch.setattr(process_liveness, "watch_process", look)
        async with asyncio.timeout(120):
            await seen.ended()
        assert found == []
        await seen.close()


@pytest.mark.parametrize("address", ["", "127.0.0.1", "127.0.0.1:x"])
async def test_an_odd_address_is_refused(address: str) -> None:
    with pytest.raises(Unavailable, match="no host:port"):
        await watch_process(address, WHO)


async def test_what_a_guest_says_is_not_kept() -> None:
    async with liveness_server("127.0.0.1", WHO) as port:
        _, guest = await asyncio.open_connection("127.0.0.1", port)
        tracemalloc.start()
        try:
            for _ in range(256):
                guest.write(bytes(1 << 16))
                await guest.drain()
            kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert kept < 8 << 20
        guest.close()
