"""The routers of a cluster as a client sees them: their addresses, and which one it asks.

Any router serves any request. A client stays with one, because a router that knows an answer
resumes it without computing, and asks the next one when this one does not answer or is ending.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ferryman.client.retries import Chance, ConnectionBroken
from ferryman.errors import FerrymanError, InvalidRequest, NoWorker, Stopping
from ferryman.security.tls import ChannelSecurity
from ferryman.wire.grpc.rpc import ANY_ADDRESS, channel
from ferryman.wire.v1.inference_pb2_grpc import InferenceServiceStub


def addresses_of(given: str) -> tuple[str, ...]:
    """The addresses in `given`: one, or several separated by commas. Raises InvalidRequest for an
    empty one."""
    found = tuple(each.strip() for each in given.split(","))
    if not all(found):
        raise InvalidRequest(
            f"{given!r}: it should be HOST:PORT, or several with commas", "address"
        )
    return tuple(dict.fromkeys(found))


class RouterDoor:
    """The gRPC door of one router; `num_calls` are under way there."""

    def __init__(self, address: str, security: ChannelSecurity) -> None:
        self.address = address
        self.num_calls = 0
        self._channel = channel(address, security=security, more=ANY_ADDRESS)
        self.stub = InferenceServiceStub(self._channel)

    async def close(self) -> None:
        """Ends all calls in progress."""
        await self._channel.close()


class RouterDoors:
    """The doors of the routers at `addresses`. `chance` chooses the first one, so that many clients
    ask all routers alike.

    A name with several IP addresses is one door here, which leads to one of them by chance for as
    long as that one answers.
    """

    def __init__(
        self, addresses: tuple[str, ...], chance: Chance, security: ChannelSecurity
    ) -> None:
        self._security = security
        self._doors = [RouterDoor(address, security) for address in addresses]
        self._now = int(chance() * len(addresses)) % len(addresses)
        self._left: set[RouterDoor] = set()

    @property
    def now(self) -> RouterDoor:
        """The door to ask."""
        return self._doors[self._now]

    @asynccontextmanager
    async def asked(self) -> AsyncIterator[RouterDoor]:
        """The door to ask, for the length of one call."""
        door = self.now
        door.num_calls += 1
        try:
            yield door
        finally:
            door.num_calls -= 1
            if door in self._left and not door.num_calls:
                self._left.discard(door)
                await door.close()

    def failed(self, door: RouterDoor, error: FerrymanError, *, has_answered: bool = False) -> None:
        """The next door is asked from now on if, by this error, no answer is to be had at `door`.

        A connection that breaks under an answer is made again first. The calls under way at a
        router that died all come here; the first of them counts.
        """
        if door is not self.now:
            return
        if isinstance(error, Stopping | NoWorker):
            # The connection is sound, so gRPC would keep it. A new channel asks for the addresses
            # of the name again, and may lead to another router. Answers under way keep the old one.
            self._doors[self._now] = RouterDoor(door.address, self._security)
            self._left.add(door)
        elif has_answered or not isinstance(error, ConnectionBroken):
            return
        self._now = (self._now + 1) % len(self._doors)

    async def close(self) -> None:
        """Ends all calls in progress."""
        for door in (*self._doors, *self._left):
            await door.close()
