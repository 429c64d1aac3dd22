"""The data planes for units; a pair of workers agrees on one for each reservation.

The writer offers its planes with Reserve, decode chooses with its answer. gRPC is always there;
NIXL is chosen when both have it and decode can watch that the writer lives (`process_liveness.py`).
NIXL's transport, UCX, asks for no credential, so a worker has NIXL only if its settings
name that danger.
Every obstacle to NIXL, on either side and at any time, is one value: `GrpcOnly`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ferryman.cache.manifest import Kind

GRPC, NIXL = "grpc", "nixl"
LOCAL = "local"  # prefill and decode are one worker, so nothing travels
PlaneChoice = Literal["auto", "grpc", "nixl-unlocked", "nixl-unlocked-or-grpc"]
UNLOCKED: tuple[PlaneChoice, ...] = ("nixl-unlocked", "nixl-unlocked-or-grpc")


@dataclass(frozen=True, slots=True)
class GrpcOnly:
    """Frames over gRPC, which the receiver copies and can refuse; `why` gives in short why not
    NIXL."""

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


PlaneOffer = NixlOffer | GrpcOnly
Plane = NixlGrant | GrpcOnly
