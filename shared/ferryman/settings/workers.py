"""The settings of workers: those that prefill, those that decode, and those that do both."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field

from ferryman.settings.declaration import GROUP, Called, Count
from ferryman.settings.engine import EngineOptions
from ferryman.settings.groups import (
    AccessSettings,
    BusSettings,
    LifeSettings,
    ListenSettings,
    TierPolicySettings,
    TracingSettings,
)
from ferryman.wire.hostcache.arena import SHARED_MEMORY
from ferryman.wire.plane_values import UNLOCKED, PlaneChoice


def _named_by_its_danger(choice: object) -> object:
    """Raises ValueError for the old name of NIXL, which did not say that its port has no lock."""
    if choice == "nixl":
        raise ValueError(
            "NIXL opens a port that asks nobody for a credential, and its name has to say so: "
            f"write {' or '.join(UNLOCKED)}, or auto, which opens none"
        )
    return choice


Planes = Annotated[PlaneChoice, BeforeValidator(_named_by_its_danger)]


class HostCacheSettings(TierPolicySettings):
    """The node's host-cache as a worker uses it."""

    address: str = ""
    """The host:port of this machine's host-cache; without one, no host tier."""
    call_seconds: Annotated[float, Field(gt=0, le=10)] = 0.2
    """A call that takes the host-cache longer is a miss."""


class NixlSettings(BaseModel):
    """NIXL's own. `error_handling` "none" never notices a dead peer: one machine, on purpose."""

    model_config = GROUP
    error_handling: Literal["peer", "none"] = "peer"
    """`none` never notices a dead peer: use it only if all workers are on one machine."""


class ShellSettings(BaseModel):
    """The settings of all kinds of worker."""

    model_config = GROUP
    worker: EngineOptions
    listen: ListenSettings = ListenSettings()
    """For gRPC."""
    observe: Annotated[ListenSettings, Called(port="observe_port")] = ListenSettings()
    """`/metrics`, `/health`, `/debug/ledger`."""
    bus: Annotated[BusSettings, Called(url="nats_url")] = BusSettings()
    hostcache: Annotated[
        HostCacheSettings, Called(address="hostcache_address", call_seconds="lookup_seconds")
    ] = HostCacheSettings()
    life: LifeSettings = LifeSettings()
    access: AccessSettings = AccessSettings()
    traced: TracingSettings = TracingSettings()
    advertise: str = "127.0.0.1"
    """The host under which others reach this process; NIXL's traffic stays on the device that has
    its address."""
    planes: Planes = "auto"
    """The way that hand-offs take. `auto`: memory between workers that see the same
    `ARENA_FOLDER`, else gRPC. `grpc`. `nixl-rdma`: NIXL by RDMA alone, where a writer needs a key,
    between workers that have it, else gRPC. `nixl-unlocked`: NIXL, which opens ports that ask for
    no credential; a worker waits for it, and ends at start if it does not work.
    `nixl-unlocked-or-grpc`: the same between two workers that have it, else gRPC."""
    arena_folder: Path = SHARED_MEMORY
    """Shared memory that processes of one machine see: the host-cache's arena, and the sockets at
    which decode workers lend memory to those that hand off to them."""
    nixl: Annotated[NixlSettings, Called(error_handling="nixl_error_handling")] = NixlSettings()
    asked_running: Annotated[int, Field(ge=0)] = 0
    """Requests at once that were asked for, if `MAX_RUNNING` was derived from them (`ferryman up`
    sets it): the worker says why it runs fewer. 0: `MAX_RUNNING`."""


AuditShare = Annotated[float, Field(ge=0, le=1)]


class PrefillSettings(ShellSettings):
    """Settings of a prefill worker."""

    @property
    def engine(self) -> EngineOptions:
        """The worker's options: prompts that wait for their commit need rows of their own."""
        changes = {"max_prealloc": self.worker.max_running, "decodes": False}
        return self.worker.model_copy(update=changes)


class DecodeSettings(ShellSettings):
    """Settings of a decode worker."""

    max_reserved: Count = 8
    """Hand-offs that a decode worker may have under way."""
    audit_share: AuditShare = 0.0
    """The share of requests that reused state to compute again and compare: docs/audit.md."""

    @property
    def engine(self) -> EngineOptions:
        """The worker's options: hand-offs under way have rows besides the running requests."""
        return _audited(self.worker, self.audit_share, self.max_reserved)


class BothSettings(ShellSettings):
    """Settings of a worker that prefills and decodes. It ignores `planes`: it hands nothing off."""

    audit_share: AuditShare = 0.0
    """The share of requests that reused state to compute again and compare: docs/audit.md."""

    @property
    def engine(self) -> EngineOptions:
        """A request keeps its row from its first chunk to its last token."""
        turns = self.worker.model_copy(update={"takes_turns": True})
        return _audited(turns, self.audit_share, 0)


def _audited(options: EngineOptions, share: float, max_reserved: int) -> EngineOptions:
    """An audit has a row of its own, so that it finds one when all requests run."""
    changes = {"audit_share": share, "max_prealloc": max_reserved + bool(share)}
    return options.model_copy(update=changes)
