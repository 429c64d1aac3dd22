"""The routers of a cluster as a client sees them: their addresses, and which one it asks.

Any router serves any request. A client stays with one, because a router that knows an answer
resumes it without computing, and asks the next one when this one does not answer or is ending.
"""

from __future__ import annotations

from ferryman.client.retries import Chance, ConnectionBroken
from ferryman.errors import FerrymanError, InvalidRequest, NoWorker, Stopping
from ferryman.wire.grpc.rpc import channel
from ferryman.wire.grpc.tls import ChannelSecurity
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
    """The gRPC door of one router."""

    def __init__(self, address: str, security: ChannelSecurity) -> None:
        self.address = address
        self._channel = channel(address, security=security)
        self.stub = InferenceServiceStub(self._channel)

    async def close(self) -> None:
        """Ends all calls in progress."""
        await self._channel.close()


class RouterDoors:
    """The doors of the routers at `addresses`. `chance` chooses the first one, so that many clients
    ask all routers alike.

    A name with several IP addresses is one door here; gRPC goes through them by itself.
    """

    def __init__(
        self, addresses: tuple[str, ...], chance: Chance, security: ChannelSecurity
    ) -> None:
        self._doors = [RouterDoor(address, security) for address in addresses]
        self._now = int(chance() * len(addresses)) % len(addresses)

    @property
    def now(self) -> RouterDoor:
        """The door to ask."""
        return self._doors[self._now]

    def failed(self, door: RouterDoor, error: FerrymanError, *, has_answered: bool = False) -> None:
        """The next door is asked from now on if, by this error, no answer is to be had at `door`.

        A connection that breaks under an answer is made again first. The calls under way at a
        router that died all come here; the first of them counts.
        """
        is_cut = isinstance(error, ConnectionBroken) and not has_answered
        if door is self.now and (is_cut or isinstance(error, Stopping | NoWorker)):
            self._now = (self._now + 1) % len(self._doors)

    async def close(self) -> None:
        """Ends all calls in progress."""
        for door in self._doors:
            await door.close()
