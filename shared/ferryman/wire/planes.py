"""The ways on which units travel; a pair of workers agrees on one for each reservation.

The writer offers with Reserve what it can do, decode chooses with its answer. GrpcPlane is always
there; NIXL is chosen when both have it and decode can watch the writer's life (`presence.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GRPC, NIXL = "grpc", "nixl"
PlaneChoice = Literal["auto", "grpc", "nixl"]


@dataclass(frozen=True, slots=True)
class GrpcPlane:
    """Frames over gRPC: the receiver copies, and can refuse."""


@dataclass(frozen=True, slots=True)
class NixlOffer:
    """The writer can write by itself. A connection to `presence` ends when its process does."""

    presence: str


@dataclass(frozen=True, slots=True)
class NixlGrant:
    """Where the writer may write by itself: one address per wanted unit, in their order."""

    agent: str
    metadata: bytes
    device: int
    addresses: tuple[int, ...]


PlaneOffer = GrpcPlane | NixlOffer
Plane = GrpcPlane | NixlGrant
