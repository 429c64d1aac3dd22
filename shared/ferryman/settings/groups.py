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
    """Settings of a process's start, log and end."""

    model_config = GROUP
    drain_seconds: Seconds = 30.0
    """The time that a drain may take before it is cut off."""
    parent_pid: Annotated[int, Field(ge=0)] = 0
    """Ends when that process does; 0: none."""
    log_level: LogLevel = "INFO"
    """`DEBUG`, `INFO`, `WARNING`, `ERROR`."""


class TracingSettings(BaseModel):
    """The spans of OpenTelemetry that a process sends, and the broker's own traces. Without a
    collector it makes no spans."""

    model_config = GROUP
    otlp_endpoint: str = ""
    """The collector of spans, `http://HOST:4318` or `grpc://HOST:4317`, with `?share=0.1` for a
    tenth of the traces that begin here; empty: none. Wants `ferryman[otel]`."""
    broker_traces: bool = False
    """Asks the broker (nats-server 2.11 or newer) to trace lifecycle events of requests whose
    `traceparent` is sampled, for `ferryman trace --broker`."""


class AccessSettings(BaseModel):
    """The proofs that a process shows to others of its cluster, and asks them for."""

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
    """The address that a server listens on."""

    model_config = GROUP
    host: str = "127.0.0.1"
    """The address to listen on."""
    port: Port = 0
    """0 takes a free one."""


class BusSettings(BaseModel):
    """The broker NATS, and the cluster whose subjects are used."""

    model_config = GROUP
    url: str = "nats://127.0.0.1:4222"
    """The broker."""
    cluster: Name = "local"
    """The cluster's name in subjects, 1 to 32 of `a-z 0-9 -`."""


class IndexSettings(BaseModel):
    """The index in Redis, and the time that it may take to answer before it counts as away."""

    model_config = GROUP
    url: str = "redis://127.0.0.1:6379/0"
    """The index of host and storage tiers, a Redis."""
    lookup_seconds: Annotated[float, Field(gt=0, le=10)] = 0.2
    """For Redis, this machine's host-cache or (0.25) another node's to answer. A Redis that takes
    longer is away until it answers a probe, a host-cache has nothing."""


class TierPolicySettings(BaseModel):
    """The policies by which units move between tiers: those of the device by a worker, of storage
    by a host-cache. A host-cache's `prefetch_policy` is for callers that name none, mostly
    routers."""

    model_config = GROUP
    write_policy: WritePolicyName = "write_through"
    """The time of a write to the next tier, from the device to the host and from it to storage: at
    once; `write_through_selective`: at the second hit; `write_back`: before it is evicted."""
    prefetch_policy: PrefetchPolicyName = "timeout"
    """The time that a prompt waits for storage and peers: 1 s + 0.25 s per 1,024 tokens;
    `best_effort`: none, so it uses what came since it was routed; `wait_complete`: to its
    deadline."""
    prefetch_threshold: PrefetchThreshold = PREFETCH_THRESHOLD
    """Tokens below which nothing is prefetched; routers reckon with slower tiers from this gain
    on, so keep it the same for all."""
