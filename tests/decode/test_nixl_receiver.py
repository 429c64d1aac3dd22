"""Agents for writers: each closed before its slots are free, and none waited for without end.

The words of each writer are passed on while its agent is open.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from ipaddress import ip_address
from typing import cast

import pytest
from tests.planes import warnings_beside_those_of_ports
from tests.waiting import until

from ferryman.errors import Unavailable
from ferryman.handoff.effects import WriterId
from ferryman.runtime.background import Background
from ferryman.runtime.life import alongside
from ferryman.wire.handoff import process_liveness as presence_module
from ferryman.wire.handoff.host_network import ListeningSocket
from ferryman.wire.handoff.nixl_agent import NixlAgent
from ferryman.wire.handoff.nixl_library import MemoryRegion, NixlOptions
from ferryman.wire.handoff.process_liveness import liveness_server
from ferryman.wire.plane_values import GrpcOnly
from ferryman.worker.planes import NixlSide
from ferryman_decode import nixl_receiver as landing_module
from ferryman_decode.nixl_receiver import NixlReceiver, WriterAgent

WRITER = WriterId("prefill-00000001", 7)
LEFT = 60.0


class ToyAgent:
    """Closes when it may."""

    unlocked_ports = (ListeningSocket("tcp", ip_address("127.0.0.1"), 4567),)

    def __init__(self, name: str) -> None:
        self.name = name
        self.may_close = threading.Event()
        self.may_close.set()
        self.num_asked = 0
        self.is_closed = False
        self.heard: asyncio.Queue[list[bytes]] = asyncio.Queue()

    async def notifications(self) -> list[bytes]:
        if self.is_closed:
            raise Unavailable("it is closed")
        return await self.heard.get()

    def close(self) -> None:
        self.num_asked += 1
        assert self.may_close.wait(60), "a test lets it close"
        self.is_closed = True


class Toys:
    """Makes toy agents; `may_make` holds it up, `is_broken` has it fail."""

    def __init__(self) -> None:
        self.made: list[ToyAgent] = []
        self.may_make = threading.Event()
        self.may_make.set()
        self.is_broken = False

    def __call__(
        self, name: str, regions: Sequence[MemoryRegion], options: NixlOptions
    ) -> NixlAgent:
        assert self.may_make.wait(60), "a test lets it go on"
        if self.is_broken:
            raise Unavailable("NIXL: NIXL_ERR_BACKEND")
        self.made.append(ToyAgent(name))
        return cast(NixlAgent, self.made[-1])


class Site:
    """A landing, its agents, and the lives that it said are over."""

    def __init__(self, background: Background, *, is_required: bool) -> None:
        self.toys = Toys()
        self.dead: list[WriterId] = []
        self.told: list[bytes] = []
        side = NixlSide({}, is_required=is_required, make=self.toys)
        died, told = self.dead.append, self.told.append
        self.landing = NixlReceiver(side, "decode", background, died, told)

    async def writer_agent(self, writer: WriterId, address: str) -> WriterAgent:
        found = await self.landing.agent_for(writer, address, LEFT)
        assert isinstance(found, WriterAgent), found
        return found


@asynccontextmanager
async def site(*, is_required: bool = False) -> AsyncIterator[Site]:
    async with Background() as background:
        found = Site(background, is_required=is_required)
        async with alongside(found.landing.run()):
            await until(lambda: found.landing.planes == ("nixl", "grpc"))
            try:
                yield found
            finally:
                for toy in found.toys.made:
                    toy.may_close.set()
                found.toys.may_make.set()
    assert all(toy.is_closed for toy in found.toys.made), "none outlives its worker"


async def test_an_agent_that_was_made_ahead_is_granted_and_the_next_one_made() -> None:
    async with site() as here, liveness_server("127.0.0.1", WRITER) as port:
        writer_agent = await here.writer_agent(WRITER, f"127.0.0.1:{port}")
        assert writer_agent.agent.name == "decode.1"
        assert await here.writer_agent(WRITER, f"127.0.0.1:{port}") is writer_agent
        await until(lambda: len(here.toys.made) == 2)


async def test_every_message_of_a_writer_is_passed_on_in_order() -> None:
    async with site() as here, liveness_server("127.0.0.1", WRITER) as port:
        await here.writer_agent(WRITER, f"127.0.0.1:{port}")
        agent = here.toys.made[0]
        agent.heard.put_nowait([b"one", b"two"])
        agent.heard.put_nowait([b"three"])
        await until(lambda: here.told == [b"one", b"two", b"three"])


async def test_a_death_counts_once_every_agent_of_that_life_is_closed() -> None:
    """That includes an agent that another task is closing because its writer lost writes."""
    async with site() as here:
        async with liveness_server("127.0.0.1", WRITER) as port:
            writer_agent = await here.writer_agent(WRITER, f"127.0.0.1:{port}")
            agent = here.toys.made[0]
            agent.may_close.clear()
            closing = asyncio.create_task(here.landing.close(writer_agent))
            await until(lambda: agent.num_asked == 1)
        await until(lambda: agent.num_asked == 2)
        assert not here.dead, "it may still land there"
        agent.may_close.set()
        await until(lambda: here.dead == [WRITER])
        await closing


async def test_who_asks_for_a_strip_that_is_being_closed_waits_for_its_end() -> None:
    async with site() as here, liveness_server("127.0.0.1", WRITER) as port:
        writer_agent = await here.writer_agent(WRITER, f"127.0.0.1:{port}")
        agent = here.toys.made[0]
        agent.may_close.clear()
        both = [asyncio.create_task(here.landing.close(writer_agent)) for _ in range(2)]
        await until(lambda: agent.num_asked == 2)
        assert not any(one.done() for one in both)
        agent.may_close.set()
        await asyncio.gather(*both)


async def test_closing_a_strip_leaves_the_writers_next_one_open() -> None:
    """Two reservations lost writes on the first; the second to say so says nothing of the next."""
    async with site() as here, liveness_server("127.0.0.1", WRITER) as port:
        first = await here.writer_agent(WRITER, f"127.0.0.1:{port}")
        await here.landing.close(first)
        await until(lambda: here.landing._spare.is_made)
        second = await here.writer_agent(WRITER, f"127.0.0.1:{port}")
        await here.landing.close(first)
        assert await here.writer_agent(WRITER, f"127.0.0.1:{port}") is second
        assert not here.toys.made[1].is_closed


async def test_a_writer_that_cannot_be_watched_is_asked_for_once_in_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with site() as here, liveness_server("127.0.0.1", WRITER) as port:
        stranger = WriterId("prefill-00000002", 1)
        for _ in range(3):
            found = await here.landing.agent_for(stranger, f"127.0.0.1:{port}", LEFT)
            assert isinstance(found, GrpcOnly)
            assert "watch" in found.why
        assert len(warnings_beside_those_of_ports(caplog)) == 1


async def test_a_writer_that_says_nothing_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be stopped: the look at it goes on, the hand-offs go by gRPC."""

    async def say_nothing(reader: asyncio.StreamReader, guest: asyncio.StreamWriter) -> None:
        await reader.read()
        guest.close()

    monkeypatch.setattr(presence_module, "CONNECT_SECONDS", 600.0)
    monkeypatch.setattr(landing_module, "OPEN_SECONDS", 0.2)
    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    async with server, site() as here:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        asking = [here.landing.agent_for(WRITER, address, left) for left in [LEFT] * 20 + [1e-3]]
        async with asyncio.timeout(120):
            found = await asyncio.gather(*asking)
        assert all(isinstance(each, GrpcOnly) for each in found)
        assert list(here.landing._openings) == [WRITER], "nobody has waited for the end of it"


async def test_an_agent_for_a_writer_that_died_meanwhile_is_closed() -> None:
    async with site(is_required=True) as here:
        other = WriterId("prefill-00000002", 9)
        async with liveness_server("127.0.0.1", other) as port:
            here.toys.may_make.clear()
            await here.writer_agent(other, f"127.0.0.1:{port}")
            async with liveness_server("127.0.0.1", WRITER) as its_port:
                asking = asyncio.create_task(
                    here.landing.agent_for(WRITER, f"127.0.0.1:{its_port}", LEFT)
                )
                await until(lambda: WRITER in here.landing._lives)
            await until(lambda: here.dead == [WRITER])
            here.toys.may_make.set()
            assert isinstance(await asking, GrpcOnly)
            await until(lambda: here.toys.made[1].is_closed)
            assert not here.toys.made[0].is_closed


async def test_nixl_that_fails_later_leaves_hand_offs_to_grpc() -> None:
    async with site() as here, liveness_server("127.0.0.1", WRITER) as port:
        here.toys.is_broken = True
        await here.writer_agent(WRITER, f"127.0.0.1:{port}")
        await until(lambda: here.landing.planes == ("grpc",))
        found = await here.landing.agent_for(WriterId("prefill-00000002", 1), "127.0.0.1:1", LEFT)
        assert isinstance(found, GrpcOnly)
        assert "NIXL_ERR_BACKEND" in found.why
