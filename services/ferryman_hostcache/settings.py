"""The settings of a host-cache: `FERRYMAN_HOSTCACHE_*`."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic_settings import BaseSettings

from ferryman.runtime.settings import (
    PREFETCH_THRESHOLD,
    BusSettings,
    Count,
    IndexSettings,
    LifeSettings,
    ListenSettings,
    PrefetchPolicyName,
    PrefetchThreshold,
    Seconds,
    WritePolicyName,
    settings_config,
)
from ferryman.tiers.layout import SNAPSHOT_SHARE
from ferryman.wire.host_arena import SHARED_MEMORY
from ferryman_hostcache.storage.settings import StorageSettings


class Settings(BaseSettings):
    """`memory_bytes` is the arena's size, all of it allocated at start in `arena_folder`.

    `listen` is for gRPC, `observe` for /metrics, /health and /debug/ledger. `advertise` is the host
    at which routers and other nodes reach this one. `node` names this machine in the index.
    `snapshot_share` of the arena is for recurrent states: with half, a model whose state weighs as
    much as the pages of 4,000 tokens has one for each 4,000 tokens kept.
    `write_policy` says when the host tier is written to storage; the prefetch settings hold for
    callers that name none. Prefetches under way hold at most `prefetch_share` of the arena, and
    there are at most `max_prefetches`; `max_fetches` other nodes are served at once. A node that
    takes longer than `peer_lookup_seconds` to say what it holds is a miss.
    """

    model_config = settings_config("hostcache")
    listen: ListenSettings = ListenSettings()
    observe: ListenSettings = ListenSettings()
    advertise: str = "127.0.0.1"
    memory_bytes: Annotated[int, Field(ge=mmap.PAGESIZE)] = 256 << 20
    arena_folder: Path = SHARED_MEMORY
    node: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,32}$")] = "local"
    lease_seconds: Seconds = 5.0
    snapshot_share: Annotated[float, Field(gt=0, lt=1)] = SNAPSHOT_SHARE
    storage: StorageSettings = StorageSettings()
    write_policy: WritePolicyName = "write_through"
    prefetch_policy: PrefetchPolicyName = "timeout"
    prefetch_threshold: PrefetchThreshold = PREFETCH_THRESHOLD
    prefetch_share: Annotated[float, Field(gt=0, le=1)] = 0.25
    max_prefetches: Count = 32
    max_fetches: Count = 8
    peer_lookup_seconds: Seconds = 0.25
    bus: BusSettings = BusSettings()
    index: IndexSettings = IndexSettings()
    life: LifeSettings = LifeSettings()
