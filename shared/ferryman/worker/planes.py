"""Which data planes a worker has: by what is installed, what it was told, where its slabs lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, ConfigDict

from ferryman.cache.manifest import Kind
from ferryman.engine.places import HOST, SlabPlace
from ferryman.errors import ConfigError
from ferryman.wire.nixl_agent import NixlAgent, NixlOptions, Region, has_nixl
from ferryman.wire.planes import PlaneChoice

MakeAgent = Callable[[str, Sequence[Region], NixlOptions], NixlAgent]


class NixlSettings(BaseModel):
    """NIXL's own. `error_handling` "none" never notices a dead peer: one machine, on purpose."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    error_handling: Literal["peer", "none"] = "peer"


@dataclass(frozen=True, slots=True)
class GrpcSide:
    """A worker that speaks gRPC alone; `why` in a few words."""

    why: str = "has no NIXL"


@dataclass(frozen=True, slots=True)
class NixlSide:
    """What a worker brings to NIXL: its slabs, and a host at which its life can be watched.

    `is_required` when somebody asked for it: then a library that does not work is no small matter.
    """

    places: Mapping[Kind, SlabPlace]
    listen_host: str = "127.0.0.1"
    advertise: str = "127.0.0.1"
    options: NixlOptions = field(default_factory=NixlOptions)
    is_required: bool = False
    make: MakeAgent = NixlAgent

    @property
    def regions(self) -> list[Region]:
        return [
            Region(place.address, place.num_bytes, place.device)
            for place in self.places.values()
            if place.num_bytes
        ]

    @property
    def device(self) -> int:
        """Where all slabs lie."""
        (device,) = {place.device for place in self.places.values()}
        return device


PlaneSide = GrpcSide | NixlSide


def plane_side(
    choice: PlaneChoice,
    places: Mapping[Kind, SlabPlace],
    hosts: tuple[str, str],
    nixl: NixlSettings,
) -> PlaneSide:
    """`hosts` are (listen, advertise). Raises ConfigError for NIXL that is asked for and not there.

    A worker of several ranks has no places: no slot of it lies in one piece, and it speaks gRPC.
    Slabs on a CUDA device go by NIXL when it is asked for; nobody has tried it on one yet.
    """
    if choice == "nixl" and not has_nixl():
        raise ConfigError("PLANES=nixl needs NIXL: pip install 'ferryman[nixl]'")
    if choice == "nixl" and not places:
        raise ConfigError("PLANES=nixl needs WORKER__TP_SIZE=1: ranks share each slot")
    if why := _objection(choice, places):
        return GrpcSide(why)
    options = NixlOptions(nixl.error_handling)
    return NixlSide(places, *hosts, options, is_required=choice == "nixl")


def _objection(choice: PlaneChoice, places: Mapping[Kind, SlabPlace]) -> str:
    """What speaks against NIXL; empty if nothing does."""
    if choice == "grpc":
        return "was told to use gRPC"
    if not has_nixl():
        return "has no NIXL"
    if not places:
        return "has several ranks"
    on_host = all(place.device == HOST for place in places.values())
    return "" if on_host or choice == "nixl" else "has its slabs on a card"
