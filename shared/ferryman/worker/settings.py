"""Settings that prefill and decode workers share, and the engine options they mean."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from ferryman.engine.assembly import EngineOptions
from ferryman.engine.drafting import DraftOptions
from ferryman.runtime.settings import (
    PREFETCH_THRESHOLD,
    PrefetchPolicyName,
    PrefetchThreshold,
    WorkerSettings,
    WritePolicyName,
)


class HostCacheSettings(BaseModel):
    """Where the node's host-cache is; an empty address is a worker without one.

    A call that takes it longer than `call_seconds`, beyond a wait that was asked for, is a miss.
    `write_policy` says when the device tier is written to it. `prefetch_policy` says how long a
    request waits for slower tiers, `prefetch_threshold` below how many tokens it does not.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    address: str = ""
    call_seconds: Annotated[float, Field(gt=0, le=10)] = 0.2
    write_policy: WritePolicyName = "write_through"
    prefetch_policy: PrefetchPolicyName = "timeout"
    prefetch_threshold: PrefetchThreshold = PREFETCH_THRESHOLD


def engine_options(
    settings: WorkerSettings, max_prealloc: int, *, draft_tokens: int = 0
) -> EngineOptions:
    """`max_prealloc` rows beyond the running ones are for prompts that are handed over.

    Who prefills for others verifies no drafts, but keeps a draft model's state for who does.
    """
    return EngineOptions(
        model=settings.model,
        dtype=settings.dtype,
        page_size=settings.page_size,
        chunk_tokens=settings.chunk_tokens,
        max_running=settings.max_running,
        max_prealloc=max_prealloc,
        max_waiting=settings.max_waiting,
        memory_bytes=settings.memory_bytes,
        recurrent_slots=settings.recurrent_slots,
        prefix_cache=settings.prefix_cache,
        overlap=settings.overlap,
        device=settings.device,
        num_threads=settings.num_threads,
        snapshot_grid=settings.snapshot_grid,
        draft=DraftOptions(settings.draft, draft_tokens),
        tp_size=settings.tp_size,
        silence_seconds=settings.rank_silence_seconds,
    )
