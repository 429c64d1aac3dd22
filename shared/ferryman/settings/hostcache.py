"""The settings of a host-cache."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from ferryman.settings.declaration import (
    GROUP,
    Called,
    Count,
    Fixed,
    NodeName,
    Seconds,
    Share,
    Size,
)
from ferryman.settings.groups import (
    AccessSettings,
    BusSettings,
    IndexSettings,
    LifeSettings,
    ListenSettings,
    TierPolicySettings,
    TracingSettings,
)
from ferryman.tiers.layout import SNAPSHOT_SHARE
from ferryman.wire.hostcache.arena import SHARED_MEMORY


class StorageSettings(BaseModel):
    """The storage tier's place and size. Without `folder` there is none.

    `capacity_bytes` bounds all files in the folder together. `max_reads` are under way at once,
    each with a buffer of its own. A reader's lease lasts `lease_seconds`. After repeated failures
    the folder rests for `rest_seconds`. `scan_seconds` bounds the look at old files at start; those
    not reached are aged away.
    """

    model_config = GROUP
    folder: str = ""
    """The storage tier's, on a local disk, or `s3://bucket/prefix`; without, no storage tier."""
    capacity_bytes: Annotated[Size, Field(ge=1 << 20)] = 1 << 30
    """The most bytes of all files in it, other models' included: those are evicted first."""
    max_reads: Fixed[Count] = 4
    lease_seconds: Fixed[Seconds] = 30.0
    rest_seconds: Fixed[Seconds] = 30.0
    scan_seconds: Fixed[Seconds] = 20.0


class HostCacheServiceSettings(TierPolicySettings):
    """One node's host tier, the tiers below it, and its addresses for others.

    `max_prefetches` are under way at once, and `max_fetches` other nodes are served. A reader's
    lease lasts `lease_seconds` and is renewed three times in that time.
    """

    model_config = GROUP
    cluster_key_file: Path
    """The cluster's secret. See docs/operating.md."""
    listen: ListenSettings = ListenSettings()
    """For gRPC."""
    observe: Annotated[ListenSettings, Called(port="observe_port")] = ListenSettings()
    """`/metrics`, `/health`, `/debug/ledger`."""
    advertise: str = "127.0.0.1"
    """The host under which others reach this process; NIXL's traffic stays on the device that has
    its address."""
    memory_bytes: Annotated[Size, Field(ge=mmap.PAGESIZE), Called("host_memory")] = 256 << 20
    """The largest size of the host tier's arena, whose memory is taken as it is used: `512M`, `2G`,
    bytes."""
    arena_folder: Path = SHARED_MEMORY
    """Shared memory that processes of one machine see: the host-cache's arena, and the sockets at
    which decode workers lend memory to those that hand off to them."""
    node: NodeName = "local"
    """This machine's name in the index; one name per machine. Of a long or dotted one, as clouds
    give, the beginning and a hash are taken."""
    lease_seconds: Fixed[Seconds] = 5.0
    snapshot_share: Annotated[float, Field(gt=0, lt=1)] = SNAPSHOT_SHARE
    """The share of the arena for recurrent states
    ([0012](decisions/0012-half-the-arena-for-snapshots.md))"""
    storage: Annotated[
        StorageSettings, Called(folder="storage_dir", capacity_bytes="storage_bytes")
    ] = StorageSettings()
    prefetch_share: Share = 0.25
    """The share of the arena's bytes that may come from storage and peers at once."""
    max_prefetches: Fixed[Count] = 32
    max_fetches: Fixed[Count] = 8
    bus: Annotated[BusSettings, Called(url="nats_url")] = BusSettings()
    index: Annotated[IndexSettings, Called(url="redis_url")] = IndexSettings()
    life: LifeSettings = LifeSettings()
    access: AccessSettings = AccessSettings()
    traced: TracingSettings = TracingSettings()
    peer_lookup_seconds: Annotated[Seconds, Called("lookup_seconds")] = 0.25
    """For another node to say what it holds; longer is a miss."""
