"""The options of `ferryman up`: a whole cluster, as a person asks for it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field

from ferryman.settings.declaration import GROUP, Called, Fixed, LogLevel, Name, Port, Seconds, Size
from ferryman.settings.engine import EngineOptions
from ferryman.settings.groups import TierPolicySettings, TracingSettings
from ferryman.settings.workers import AuditShare, Planes
from ferryman.wire.hostcache.arena import SHARED_MEMORY

DEFAULT_HOST_BYTES = 256 << 20
DEFAULT_STORAGE_BYTES = 1 << 30
STORAGE_NAME = "storage"
SPARE_SHARE = 2
PORTS_OF_A_ROUTER = 2  # HTTP and gRPC: the ports of the next router are so much higher


def _more_than_nothing(num_bytes: int) -> int:
    if num_bytes <= 0:
        raise ValueError("it should be more than nothing, or be left out")
    return num_bytes


# 0 stands for a value that was not given; a given value must be a size.
MORE_THAN_NOTHING = AfterValidator(_more_than_nothing)
Workers = Annotated[int, Field(ge=1, le=64)]


@dataclass(frozen=True, slots=True)
class DoorPorts:
    """The ports that one router listens on; 0 takes a free port."""

    http: int
    grpc: int


class DoorOptions(BaseModel):
    """The addresses that the routers listen on."""

    model_config = GROUP
    num_routers: Annotated[
        int, Field(ge=1, le=16), Called("workers", role="router", flag="--routers")
    ] = 1
    """The number of processes of this role (`--routers`, `--prefill`, `--decode`, `--workers`). Any
    router serves any request; the ports of each are higher by 2 than those of the one before."""
    host: Annotated[str, Called(role="router")] = "127.0.0.1"
    """The address the router listens on."""
    http_port: Port = 8000
    """The port that the (first) router listens on for HTTP; 0 takes a free one."""
    grpc_port: Port = 8001
    """The port that the (first) router listens on for gRPC; 0 takes a free one."""
    cors_origin: Annotated[str, Called(role="router")] = ""
    """Origins, separated by commas, whose pages may call the HTTP API from a browser; `*`: all;
    empty: none."""
    strict_fields: Annotated[bool, Called(role="router")] = False
    """Refuses a body with a field that is not known (400), instead of naming it with the answer."""
    verbatim_prompts: Annotated[bool, Called(role="router")] = False
    """Keeps a line in the prompt that changes with every request and means nothing to a model:
    Claude Code's `x-anthropic-billing-header`."""
    web_page: Annotated[bool, Called(role="router")] = True
    """The page at `/`: the fleet, requests as they run, why tokens were reused or computed, a chat.
    See docs/page.md."""
    state_signers: Annotated[str, Called(role="router")] = ""
    """Public keys, separated by commas, of other clusters whose state files may be loaded; this
    cluster's own always may. See docs/state-files.md."""
    default_max_tokens: Annotated[int, Field(ge=0), Called(role="router")] = 0
    """Tokens of an answer to a request that names no limit; 0: as many as there is room for."""

    @property
    def ports(self) -> tuple[DoorPorts, ...]:
        """The ports of each router, the first one's first; they may be above the highest port."""
        return tuple(
            DoorPorts(_port_of(self.http_port, i), _port_of(self.grpc_port, i))
            for i in range(self.num_routers)
        )


class TierOptions(TierPolicySettings):
    """Bytes are those of all nodes of this machine together, and of all pools; each node has an
    equal share. `host_bytes` 0 is DEFAULT_HOST_BYTES, or less if shared memory is small."""

    host_bytes: Annotated[Size, MORE_THAN_NOTHING, Called("host_memory")] = 0
    """Host tier, all pools and nodes: `512M`, `2G`, bytes; 0: 256M, or less if shared memory is
    small."""
    storage_dir: str = ""
    """Folder of the storage tier; by default in the state folder."""
    storage_bytes: Annotated[Size, Field(ge=0)] = DEFAULT_STORAGE_BYTES
    """Storage tier, all nodes: conversations go on after a restart; 0: none."""
    num_nodes: Annotated[int, Field(ge=1, le=16), Called("nodes")] = 1
    """Nodes, each with its host-cache and its workers."""

    @property
    def arena_bytes(self) -> int:
        """The bytes of one node's arena."""
        whole = self.host_bytes or min(DEFAULT_HOST_BYTES, shared_memory_bytes())
        return whole // self.num_nodes

    @property
    def has_storage(self) -> bool:
        return bool(self.storage_bytes)

    @property
    def has_storage_url(self) -> bool:
        """Whether the storage is at a URL; else it is in a folder of this machine."""
        return "://" in self.storage_dir

    @property
    def node_storage_bytes(self) -> int:
        """The bytes of one node's storage; 0 without a storage tier."""
        return self.storage_bytes // self.num_nodes

    def storage_folder(self, state_folder: Path, node: str) -> str:
        """The folder of one node's storage; empty without a storage tier."""
        if not self.has_storage:
            return ""
        if self.has_storage_url:
            return self.storage_dir if self.num_nodes == 1 else _of_node(self.storage_dir, node)
        folder = Path(self.storage_dir) if self.storage_dir else state_folder / STORAGE_NAME
        return str((folder if self.num_nodes == 1 else folder / node).absolute())

    def nodes(self) -> list[str]:
        """Their names in the index."""
        return ["local"] if self.num_nodes == 1 else list(_numbered(self.num_nodes))


def _port_of(first: int, index: int) -> int:
    return first + PORTS_OF_A_ROUTER * index if first else 0


def _of_node(url: str, node: str) -> str:
    """The place of one node's blobs under the URL of all; the options stay at its end."""
    place, *options = url.partition("?")
    return "".join((place.rstrip("/"), "/", node, *options))


@dataclass(frozen=True, slots=True)
class WorkerRole:
    """The `number` of workers of one role, each of `tp_size` ranks; `flag` sets the ranks."""

    role: str
    number: int
    tp_size: int
    flag: str


class UpOptions(BaseModel):
    """A cluster as asked for. Empty URLs mean servers of our own.

    `told` are more settings of services, by role and name: those that a cluster does not have, and
    values for one role alone. `unheeded` are lines about values that no process gets.
    """

    model_config = GROUP
    engine: EngineOptions
    revision: str = ""
    """The branch, tag or commit of a model that `--model` names by its id on the hub; empty:
    `main`."""
    memory: Annotated[Size, MORE_THAN_NOTHING] = 0
    """All that workers may take of RAM, or of each card, with weights; 0: four fifths of what is
    free."""
    served_name: str = ""
    """The model's name for clients; empty: the folder's name."""
    tool_parser: Annotated[str, Called(role="router")] = "auto"
    """The format in which the model writes calls of tools, by vLLM's name; `auto`: by its chat
    template. `none`: they stay text."""
    reasoning_parser: Annotated[str, Called(role="router")] = "auto"
    """The format in which the model writes its thoughts, by vLLM's name; `auto`: by its chat
    template. `none`: they stay text."""
    num_prefill: Annotated[Workers, Called("workers", role="prefill", flag="--prefill")] = 1
    """The number of workers of this role (`--prefill`, `--decode`)."""
    num_decode: Annotated[Workers, Called("workers", role="decode", flag="--decode")] = 1
    """The number of workers of this role (`--prefill`, `--decode`)."""
    prefill_tp: Annotated[Workers, Called("tp_size", role="prefill", flag="--prefill-tp")] = 1
    """Ranks (processes) that share each prefill worker's model."""
    decode_tp: Annotated[Workers, Called("tp_size", role="decode", flag="--decode-tp")] = 1
    """Ranks (processes) that share each decode worker's model."""
    worker: Literal["apart", "both"] = "apart"
    """`apart`: workers that prefill, and workers that decode. `both`: workers that do both, in
    turns (`--workers`)."""
    num_both: Annotated[Workers, Called("workers", role="both", flag="--workers")] = 1
    """The number of workers that do both, with `--worker both`."""
    both_tp: Annotated[Workers, Called("tp_size", role="both", flag="--worker-tp")] = 1
    """Ranks (processes) that share the model of each worker that does both."""
    doors: DoorOptions = DoorOptions()
    nats_url: str = ""
    """A broker to use instead of an own one."""
    redis_url: str = ""
    """A Redis to use instead of an own one."""
    cluster: Name = "local"
    """The cluster's name in NATS subjects."""
    planes: Planes = "auto"
    """The way that hand-offs take. `auto`: memory that workers share. `grpc`. `nixl-rdma`: NIXL
    by RDMA alone. `nixl-unlocked`, `nixl-unlocked-or-grpc`: NIXL, which opens ports that ask for no
    credential."""
    audit_share: AuditShare = 0.0
    """The share of requests that reused state to compute again and compare: docs/audit.md."""
    insecure: bool = False
    """Starts NATS, Redis and services that ask for no credential: for networks that no stranger
    reaches."""
    tls_dir: str = ""
    """A folder of certificates, as `ferryman certs` makes it: HTTPS, and TLS between all processes;
    our own Redis has a socket and no port."""
    tiers: TierOptions = TierOptions()
    start_seconds: Seconds = 120.0
    """The time that a process may make no progress before it is ready; a load that advances may
    take any time."""
    drain_seconds: Seconds = 30.0
    """The time that running requests may take at the end."""
    log_level: LogLevel = "INFO"
    """DEBUG, INFO, WARNING or ERROR."""
    traced: TracingSettings = TracingSettings()
    state_dir: Path = Path(".ferryman")
    """Folder of the cluster: endpoints, logs, its key."""
    told: Fixed[Mapping[str, Mapping[str, Any]]] = Field(default={}, repr=False)
    unheeded: Fixed[tuple[str, ...]] = Field(default=(), repr=False)

    @property
    def threads(self) -> int:
        """Threads of each rank of each worker."""
        return self.engine.num_threads or max(1, usable_cores() // sum(self._ranks().values()))

    @property
    def all_threads(self) -> int:
        """Threads of compute of all ranks of all workers together."""
        return sum(number * self._threads_of(role) for role, number in self._ranks().items())

    @property
    def roles(self) -> tuple[WorkerRole, ...]:
        """The roles that workers of this cluster have."""
        if self.worker == "both":
            return (WorkerRole("both", self.num_both, self.both_tp, "--worker-tp"),)
        return (
            WorkerRole("prefill", self.num_prefill, self.prefill_tp, "--prefill-tp"),
            WorkerRole("decode", self.num_decode, self.decode_tp, "--decode-tp"),
        )

    @property
    def num_prefilling(self) -> int:
        """Workers that compute prompts."""
        return self.roles[0].number

    @property
    def idle_flags(self) -> tuple[str, ...]:
        """The flags with a number, of roles that this cluster has no workers of."""
        apart = {"--prefill": self.num_prefill, "--decode": self.num_decode}
        apart |= {"--prefill-tp": self.prefill_tp, "--decode-tp": self.decode_tp}
        both = {"--workers": self.num_both, "--worker-tp": self.both_tp}
        idle = both if self.worker == "apart" else apart
        return tuple(flag for flag, number in idle.items() if number != 1)

    def _ranks(self) -> Mapping[str, int]:
        return {workers.role: workers.number * workers.tp_size for workers in self.roles}

    def _threads_of(self, role: str) -> int:
        threads = str(self.told.get(role, {}).get("num_threads", ""))
        # The worker refuses a text that is no number.
        return int(threads) if threads.isdecimal() else self.threads

    @property
    def draft_model(self) -> str:
        """The folder of the draft model; empty without one."""
        draft = self.engine.draft_model
        return str(Path(draft).absolute()) if draft else ""


def shared_memory_bytes() -> int:
    """A share of what is free there, in whole mebibytes; a container often has little."""
    try:
        room = os.statvfs(SHARED_MEMORY)
    except OSError:
        return DEFAULT_HOST_BYTES
    return max(1, (room.f_bavail * room.f_frsize // SPARE_SHARE) >> 20) << 20


def usable_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def _numbered(number: int) -> Iterator[str]:
    return (f"node-{i}" for i in range(1, number + 1))
