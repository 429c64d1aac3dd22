"""The data planes of a worker, and the making of its NIXL agents.

The planes follow from the installed libraries, the settings and the place of the slabs. Agents are
made outside the event loop, and one that is half made is always closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ferryman.cache.manifest import Kind
from ferryman.engine.memory.slabs import ShardedSlab
from ferryman.errors import ConfigError, Unavailable
from ferryman.settings.workers import NixlSettings
from ferryman.wire.handoff.host_network import ucx_device
from ferryman.wire.handoff.lent_memory import place_of
from ferryman.wire.handoff.nixl_agent import NixlAgent
from ferryman.wire.handoff.nixl_library import ON_LOOPBACK, MemoryRegion, NixlOptions, has_nixl
from ferryman.wire.hostcache.arena import SHARED_MEMORY
from ferryman.wire.plane_values import UNLOCKED, GrpcOnly, PlaneChoice, RankSlabs

log = logging.getLogger(__name__)

AGAIN_SECONDS = 60.0
MAX_WORDS = 120
NOT_YET = "its NIXL agent is not ready"
RDMA = "nixl-rdma"
NOT_CHOSEN = "was not told to open NIXL's unlocked ports"

MakeAgent = Callable[[str, Sequence[MemoryRegion], NixlOptions], NixlAgent]


@dataclass(frozen=True, slots=True)
class NixlSide:
    """A worker's side of NIXL: its slabs, and a host at which peers can watch that it lives.

    `is_required` when the settings ask for NIXL: then a library that does not work is an error.
    """

    places: Mapping[Kind, ShardedSlab]
    listen_host: str = "127.0.0.1"
    advertise: str = "127.0.0.1"
    options: NixlOptions = ON_LOOPBACK
    is_required: bool = False
    make: MakeAgent = NixlAgent

    @property
    def regions(self) -> list[MemoryRegion]:
        return [
            MemoryRegion(slab.address, slab.num_bytes, slab.device)
            for place in self.places.values()
            for slab in place.ranks
            if slab.num_bytes
        ]


@dataclass(frozen=True, slots=True)
class MemorySide:
    """A worker that lends memory at a folder of its machine, or fills what others lend there."""

    folder: Path
    place: str


PlaneSide = NixlSide | MemorySide | GrpcOnly


def rank_slabs(places: Mapping[Kind, ShardedSlab]) -> RankSlabs:
    """The slabs as a writer and a grant name them. All kinds have the same ranks."""
    first = next(iter(places.values()))
    addresses = {
        kind: tuple(slab.address for slab in place.ranks) for kind, place in places.items()
    }
    return RankSlabs(tuple(slab.device for slab in first.ranks), addresses)


def plane_side(
    choice: PlaneChoice,
    places: Mapping[Kind, ShardedSlab],
    hosts: tuple[str, str],
    nixl: NixlSettings,
    environment: Mapping[str, str],
    arena_folder: Path = SHARED_MEMORY,
) -> PlaneSide:
    """`hosts` are (listen, advertise). Raises ConfigError if NIXL is asked for and not there.
    Blocks while the advertised name is looked up. Only choices that name its danger give NIXL, or
    that of RDMA alone; `auto` shares memory with workers that see the same `arena_folder`.

    NIXL needs a chosen network device: UCX_NET_DEVICES in `environment`, or else the interface that
    has the advertised address. One agent registers the slabs of all ranks, each on its own device.
    If the library cannot register those of cards there is no agent, and hand-offs use gRPC.
    It has run on one card, between two engines of one process.
    """
    if choice == "auto":
        return _memory_side(arena_folder)
    if choice not in (*UNLOCKED, RDMA):
        return GrpcOnly("was told to use gRPC" if choice == "grpc" else NOT_CHOSEN)
    is_required = choice == "nixl-unlocked"
    if not has_nixl():
        if is_required:
            raise ConfigError(f"PLANES={choice} needs NIXL: pip install 'ferryman[nixl]'")
        return GrpcOnly("has no NIXL")
    device = ucx_device(hosts[1], environment)
    if isinstance(device, GrpcOnly):
        if is_required:
            wanted = "set UCX_NET_DEVICES to a device that is"
            raise ConfigError(f"PLANES={choice}: {device.why}; {wanted}")
        return device
    options = NixlOptions(device, nixl.error_handling, has_keys_only=choice == RDMA)
    return NixlSide(places, *hosts, options, is_required=is_required)


def _memory_side(folder: Path) -> MemorySide | GrpcOnly:
    try:
        return MemorySide(folder, place_of(folder))
    except OSError as error:
        log.warning("hand-offs go by gRPC, no arena folder %s: %s", folder, error.strerror)
        return GrpcOnly(f"its arena folder: {error.strerror}")


class AgentMaker:
    """Makes agents, one at a time; `trouble` gives in short why there is none, or is empty."""

    def __init__(self, side: PlaneSide, name: str) -> None:
        self._side = side
        self._name = name
        self._num_tried = 0
        self._has_worked = False
        self.trouble = _trouble_of(side)

    @property
    def is_required(self) -> bool:
        """Whether hand-offs wait for the first agent."""
        return isinstance(self._side, NixlSide) and self._side.is_required

    async def make(self) -> NixlAgent:
        """Tries until it works and logs the first failure; waits for ever on a side without NIXL.

        Raises ConfigError if NIXL is required and did not work even once.
        """
        side = self._side
        if not isinstance(side, NixlSide):
            return await asyncio.Future()  # there never is one
        while True:
            try:
                agent = await self._try(side)
            except (ConfigError, Unavailable) as error:
                self._failed(error)
            else:
                self._has_worked, self.trouble = True, ""
                if not side.options.has_keys_only:
                    _warn_of_ports(agent)
                return agent
            await asyncio.sleep(AGAIN_SECONDS)

    def _failed(self, error: Exception) -> None:
        if self.is_required and not self._has_worked:
            raise ConfigError(f"NIXL does not work here: {error}") from error
        if self.trouble in ("", NOT_YET):
            log.warning("NIXL does not work here, hand-offs go by gRPC: %s", error)
        self.trouble = f"NIXL does not work here: {error}"[:MAX_WORDS]

    async def _try(self, side: NixlSide) -> NixlAgent:
        """Runs in a thread, which cannot be stopped: a cancelled caller waits for it.

        An agent must not live longer than the memory that it may touch.
        """
        self._num_tried += 1
        name = f"{self._name}.{self._num_tried}"
        making = asyncio.ensure_future(
            asyncio.to_thread(side.make, name, side.regions, side.options)
        )
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(_close)
            await asyncio.wait((making,))
            raise


def _trouble_of(side: PlaneSide) -> str:
    match side:
        case NixlSide():
            return NOT_YET
        case MemorySide():
            return NOT_CHOSEN
    return side.why or "has no NIXL"


def _warn_of_ports(agent: NixlAgent) -> None:
    """Every agent has ports of its own, so each one is named."""
    ports = ", ".join(map(str, agent.unlocked_ports)) or "no port (shared memory or RDMA alone)"
    log.warning(
        "NIXL listens without a lock at %s: it asks for no credential, so whoever can connect can "
        "write into this worker's memory or end it. Let only this cluster's workers connect, or "
        "set PLANES=auto",
        ports,
    )


def _close(making: asyncio.Future[NixlAgent]) -> None:
    if not making.cancelled() and making.exception() is None:
        making.result().close()
