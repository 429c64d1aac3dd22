"""A client of several routers: which one it asks, and where its answers go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from tests.client.fake_router import CARD, QUICK, FakeRouter, Wire, nothing, serving, token_id

from ferryman.client import Client, GenerateEvent, SamplingParams, TokenChunk
from ferryman.client.routers import addresses_of
from ferryman.errors import InvalidRequest, NoWorker, Stopping

FIVE = SamplingParams(max_tokens=5, seed=3)


@dataclass
class RelayedRouter:
    """A fake router behind a relay: with the relay's end, nobody listens at its address."""

    wire: Wire
    relay: asyncio.Server
    router: FakeRouter = field(default_factory=FakeRouter)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.relay.sockets[0].getsockname()[1]}"

    def die(self) -> None:
        self.relay.close()
        self.wire.cut()


@asynccontextmanager
async def relayed_router() -> AsyncIterator[RelayedRouter]:
    router = FakeRouter()
    async with serving(router) as address:
        wire = Wire(int(address.rpartition(":")[2]))
        relay = await asyncio.start_server(wire.relay, "127.0.0.1", 0)
        yield RelayedRouter(wire, relay, router)
        relay.close()
        await relay.wait_closed()
        await wire.close()


@dataclass
class TwoRouters:
    """A client of two routers that asks the first one first."""

    client: Client
    first: RelayedRouter
    second: RelayedRouter

    async def token_ids(self, at_two: Callable[[], None] = lambda: None) -> list[int]:
        """An answer; `at_two` is called once the client has two tokens of it."""
        found: list[int] = []
        async for event in self.client.generate("hello", FIVE):
            if isinstance(event, TokenChunk):
                found += event.token_ids
                if len(found) == 2:
                    at_two()
        return found


@pytest.fixture
async def two() -> AsyncIterator[TwoRouters]:
    async with relayed_router() as first, relayed_router() as second:
        both = f"{first.address}, {second.address}"
        async with Client(both, retries=QUICK, chance=lambda: 0.0) as client:
            yield TwoRouters(client, first, second)


WHOLE = [token_id(i) for i in range(5)]


async def test_an_answer_goes_on_at_the_other_router_when_its_own_dies(two: TwoRouters) -> None:
    async def before(at: int) -> None:
        if at == 2:
            await asyncio.Event().wait()

    two.first.router.before = before
    assert await two.token_ids(two.first.die) == WHOLE
    assert two.first.wire.num_cuts == 1
    assert (two.first.router.offsets, two.second.router.offsets) == ([0], [2])
    assert await two.token_ids() == WHOLE
    assert len(two.second.router.requests) == 2, "the client stays there"


async def test_an_answer_whose_connection_was_cut_goes_on_at_its_own_router(
    two: TwoRouters,
) -> None:
    async def before(at: int) -> None:
        if at == 2 and not two.first.wire.num_cuts:
            await asyncio.Event().wait()

    two.first.router.before = before
    assert await two.token_ids(two.first.wire.cut) == WHOLE
    assert (two.first.router.offsets, two.second.router.offsets) == ([0, 2], [])


@pytest.mark.parametrize("error", [Stopping("it ends"), NoWorker("it sees none")], ids=repr)
async def test_a_router_that_cannot_serve_sends_its_callers_to_the_other(
    two: TwoRouters, error: Stopping | NoWorker
) -> None:
    async def before(at: int) -> None:
        raise error

    two.first.router.before = before
    assert await two.token_ids() == WHOLE
    assert len(two.first.router.requests) == len(two.second.router.requests) == 1


async def test_questions_are_asked_at_a_router_that_lives(two: TwoRouters) -> None:
    two.first.relay.close()
    assert await two.client.models() == (CARD,)


async def test_many_calls_that_lose_one_router_all_go_on_at_the_next(two: TwoRouters) -> None:
    """The last to notice must not send the others back to the dead one."""

    async def before(at: int) -> None:
        if at == 1:
            if len(two.first.router.requests) == 4 and not two.first.wire.num_cuts:
                two.first.die()
            await asyncio.Event().wait()

    two.first.router.before = before
    answers = await asyncio.gather(*(two.token_ids() for _ in range(4)))
    assert answers == [WHOLE] * 4
    assert len(two.second.router.requests) == 4


@pytest.fixture
async def named() -> AsyncIterator[tuple[str, FakeRouter, FakeRouter]]:
    """One name with the addresses of two routers. No rule says which one a channel leads to."""
    one, other = FakeRouter(), FakeRouter()
    async with serving(one) as first, serving(other) as second:
        yield f"ipv4:{first}%2C{second}", one, other


@pytest.mark.parametrize("error", [Stopping("it ends"), NoWorker("it sees none")], ids=repr)
async def test_a_name_of_two_routers_leads_to_the_one_that_serves(
    named: tuple[str, FakeRouter, FakeRouter], error: Stopping | NoWorker
) -> None:
    name, *routers = named
    for leaving, left in (routers, routers[::-1]):

        async def before(at: int) -> None:
            raise error

        leaving.before, left.requests = before, []
        async with Client(name, retries=QUICK) as client:
            answers = [await one_answer(client) for _ in range(3)]
        assert answers == [WHOLE] * 3
        assert len(left.requests) == 3
        leaving.before = nothing


async def test_an_answer_under_way_at_a_router_that_ends_is_read_to_its_end(
    named: tuple[str, FakeRouter, FakeRouter],
) -> None:
    """Other calls go on at the other router meanwhile, by a connection of their own."""
    name, *routers = named
    may_end = asyncio.Event()

    async def slow(at: int) -> None:
        if at == 2:
            await may_end.wait()

    async def refused(at: int) -> None:
        if at == 0:
            raise Stopping("it ends")

    for router in routers:
        router.before = slow
    async with Client(name, retries=QUICK) as client, asyncio.timeout(120):
        under_way = client.generate("hello", FIVE)
        found = await anext(under_way), await anext(under_way), await anext(under_way)
        (its,) = (router for router in routers if router.requests)
        (other,) = (router for router in routers if not router.requests)
        its.before, other.before = refused, nothing
        assert await one_answer(client) == WHOLE
        may_end.set()
        events = [*found, *[event async for event in under_way]]
    assert words_of(events) == WHOLE
    assert not its.was_cancelled.is_set()
    assert (len(other.requests), its.offsets[0]) == (1, 0)


async def one_answer(client: Client) -> list[int]:
    return words_of([event async for event in client.generate("hello", FIVE)])


def words_of(events: Sequence[GenerateEvent]) -> list[int]:
    """The token ids of an answer."""
    chunks = [event for event in events if isinstance(event, TokenChunk)]
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


def test_addresses_are_separated_by_commas() -> None:
    assert addresses_of("a:1") == ("a:1",)
    assert addresses_of("a:1, b:2,a:1") == ("a:1", "b:2")
    with pytest.raises(InvalidRequest, match="HOST:PORT"):
        addresses_of("a:1,")
