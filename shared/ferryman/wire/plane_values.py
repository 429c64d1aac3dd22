"""The data planes for units; a pair of workers agrees on one for each reservation.

The writer offers its planes with Reserve, decode chooses with its answer. gRPC is always there.
Between processes that see the same folder of one machine decode lends the writer memory, and
copies from it. NIXL is chosen when both have it and decode can watch that the writer lives
(`process_liveness.py`). Its transports, UCX's, ask for no credential but RDMA's, where a writer
needs the key of the memory. So a worker has NIXL only by RDMA alone, or if its settings name that
danger.
Every obstacle to a plane, on either side and at any time, is one value: `GrpcOnly`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ferryman.cache.manifest import Kind

GRPC, NIXL = "grpc", "nixl"
MEMORY = "memory"  # lent by decode to a process of its machine
LOCAL = "local"  # prefill and decode are one worker, so nothing travels
PlaneChoice = Literal["auto", "grpc", "nixl-rdma", "nixl-unlocked", "nixl-unlocked-or-grpc"]
UNLOCKED: tuple[PlaneChoice, ...] = ("nixl-unlocked", "nixl-unlocked-or-grpc")


def memory_at(place: str) -> str:
    """The plane's name in a heartbeat: two workers that have the same one share a machine."""
    return f"{MEMORY}@{place}"


@dataclass(frozen=True, slots=True)
class GrpcOnly:
    """Frames over gRPC, which the receiver copies and can refuse; `why` gives in short why no
    other plane."""

    why: str = ""


@dataclass(frozen=True, slots=True)
class NixlOffer:
    """The writer can write into decode's memory. A connection to `presence` ends with its
    process."""

    presence: str


@dataclass(frozen=True, slots=True)
class RankSlabs:
    """The slabs of a worker's ranks: `devices[r]`, and for each kind the address at rank r.

    Slot s begins s times the bytes of a rank's slot after that address, at every rank.
    """

    devices: tuple[int, ...]
    addresses: Mapping[Kind, tuple[int, ...]]

    @property
    def num_ranks(self) -> int:
        return len(self.devices)


@dataclass(frozen=True, slots=True)
class NixlGrant:
    """The slots that the writer may write to: one per wanted unit, in their order.

    `layout_digest` is that of the manifest of one rank: the writer must compute the same one.
    """

    agent: str
    metadata: bytes
    slabs: RankSlabs
    slots: tuple[int, ...]
    layout_digest: str


@dataclass(frozen=True, slots=True)
class MemoryOffer:
    """The writer can fill memory that a process at the same `place` lends it."""

    place: str


@dataclass(frozen=True, slots=True)
class MemoryGrant:
    """Memory of `num_bytes` that decode lends: its descriptor is handed out at the Unix socket of
    that name, for the ticket. Decode copies from it, so no slot is in reach of the writer."""

    socket: str
    ticket: bytes = field(repr=False)
    num_bytes: int


PlaneOffer = NixlOffer | MemoryOffer | GrpcOnly
Plane = NixlGrant | MemoryGrant | GrpcOnly
