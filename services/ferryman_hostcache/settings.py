"""The settings of a host-cache: `FERRYMAN_HOSTCACHE_*`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic_settings import BaseSettings

from ferryman.runtime.settings import (
    BusSettings,
    Count,
    IndexSettings,
    LifeSettings,
    ListenSettings,
    Seconds,
    settings_config,
)
from ferryman.wire.host_arena import SHARED_MEMORY


class Settings(BaseSettings):
    """`memory_bytes` is the arena's size, all of it allocated at start in `arena_folder`.

    `listen` is for gRPC, `observe` for /metrics, /health and /debug/ledger. `node` names this
    machine in the index. `snapshot_share` of the arena is for recurrent states: with half, a model
    whose state weighs as much as the pages of 4,000 tokens has one for each 4,000 tokens kept.
    """

    model_config = settings_config("hostcache")
    listen: ListenSettings = ListenSettings()
    observe: ListenSettings = ListenSettings()
    memory_bytes: Count = 256 << 20
    arena_folder: Path = SHARED_MEMORY
    node: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,32}$")] = "local"
    lease_seconds: Seconds = 5.0
    snapshot_share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    bus: BusSettings = BusSettings()
    index: IndexSettings = IndexSettings()
    life: LifeSettings = LifeSettings()
