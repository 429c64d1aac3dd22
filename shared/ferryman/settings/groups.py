"""Groups of settings that several services have, nested as values in their models."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from ferryman.settings.declaration import (
    GROUP,
    PREFETCH_THRESHOLD,
    LogLevel,
    Name,
    Port,
    PrefetchPolicyName,
    PrefetchThreshold,
    Seconds,
    WritePolicyName,
)


class LifeSettings(BaseModel):
    """How the process lives."""

    model_config = GROUP
    drain_seconds: Seconds = 30.0
    """How long a drain may take before it is cut off."""
    parent_pid: Annotated[int, Field(ge=0)] = 0
    """Ends when that process does; 0: nobody."""
    log_level: LogLevel = "INFO"
    """`DEBUG`, `INFO`, `WARNING`, `ERROR`."""


class AccessSettings(BaseModel):
    """How the process shows others of its cluster who it is, and knows them."""

    model_config = GROUP
    credentials_file: str = ""
    """The credentials of its role for NATS, Redis and gRPC, one of the files that `ferryman
    credentials` writes; empty: an open cluster, for networks that strangers do not reach."""
    reflection: bool = False
    """Lists the methods and messages of gRPC to tools such as `grpcurl`: between services to
    observers, at the router's door to anybody."""
    tls_dir: str = ""
    """A folder of certificates, as `ferryman certs` makes it: gRPC between services by TLS at both
    ends, the router's doors by HTTPS and TLS, NATS and Redis by TLS; empty: none of it. Wants
    CREDENTIALS_FILE."""


class ListenSettings(BaseModel):
    """Where a server listens."""

    model_config = GROUP
    host: str = "127.0.0.1"
    """The address to listen on."""
    port: Port = 0
    """0 takes a free one."""


class BusSettings(BaseModel):
    """Where NATS is, and which cluster's subjects are spoken."""

    model_config = GROUP
    url: str = "nats://127.0.0.1:4222"
    """The broker."""
    cluster: Name = "local"
    """The cluster's name in subjects, 1 to 32 of `a-z 0-9 -`."""


class IndexSettings(BaseModel):
    """Where Redis is, and how long it may take to answer before it counts as away."""

    model_config = GROUP
    url: str = "redis://127.0.0.1:6379/0"
    """The index of host and storage tiers, a Redis."""
    lookup_seconds: Annotated[float, Field(gt=0, le=10)] = 0.2
    """For Redis, this machine's host-cache or (0.25) another node's to answer. A Redis that takes
    longer is away until it answers a probe, a host-cache has nothing."""


class TierPolicySettings(BaseModel):
    """When units move between tiers: of the device as a worker moves them, of storage as a
    host-cache does. A host-cache's `prefetch_policy` is for callers that name none, routers above
    all."""

    model_config = GROUP
    write_policy: WritePolicyName = "write_through"
    """When a tier is written to the next, the device's to the host and the host's to storage: at
    once; `write_through_selective`: at the second hit; `write_back`: before it is evicted."""
    prefetch_policy: PrefetchPolicyName = "timeout"
    """How long a prompt waits for storage and peers: 1 s + 0.25 s per 1,024 tokens;
    `best_effort`: not at all, so it has what came since it was routed; `wait_complete`: to its
    deadline."""
    prefetch_threshold: PrefetchThreshold = PREFETCH_THRESHOLD
    """Tokens below which nothing is prefetched; routers reckon with slower tiers from this gain
    on, so keep it the same for all."""
