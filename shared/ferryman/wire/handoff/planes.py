"""The data planes for units; a pair of workers agrees on one for each reservation.

The writer offers its planes with Reserve, decode chooses with its answer. gRPC is always there;
NIXL is chosen when both have it and decode can watch that the writer lives (`process_liveness.py`).
Every obstacle to NIXL, on either side and at any time, is one value: `GrpcOnly`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GRPC, NIXL = "grpc", "nixl"
LOCAL = "local"  # prefill and decode are one worker, so nothing travels
PlaneChoice = Literal["auto", "grpc", "nixl"]


@dataclass(frozen=True, slots=True)
class GrpcOnly:
    """Frames over gRPC, which the receiver copies and can refuse; `why` says shortly why not
    NIXL."""

    why: str = ""


@dataclass(frozen=True, slots=True)
class NixlOffer:
    """The writer can write into decode's memory. A connection to `presence` ends with its
    process."""

    presence: str


@dataclass(frozen=True, slots=True)
class NixlGrant:
    """The addresses that the writer may write to: one per wanted unit, in their order."""

    agent: str
    metadata: bytes
    device: int
    addresses: tuple[int, ...]


PlaneOffer = NixlOffer | GrpcOnly
Plane = NixlGrant | GrpcOnly
