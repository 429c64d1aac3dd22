"""The storage tier's settings: `FERRYMAN_HOSTCACHE_STORAGE__*`."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from ferryman.runtime.settings import Count, Seconds


class StorageSettings(BaseModel):
    """Where and how much. Without `folder` there is no storage tier.

    `capacity_bytes` bounds all files in the folder together. `max_reads` are under way at once,
    each with a buffer of its own. After repeated failures the folder rests for `rest_seconds`.
    `scan_seconds` bounds the look at old files at start; those not reached are aged away.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    folder: str = ""
    capacity_bytes: Annotated[int, Field(ge=1 << 20)] = 1 << 30
    max_reads: Count = 4
    lease_seconds: Seconds = 30.0
    rest_seconds: Seconds = 30.0
    scan_seconds: Seconds = 20.0
