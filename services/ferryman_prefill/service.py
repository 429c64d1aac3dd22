"""The prefill worker as a process."""

from __future__ import annotations

import asyncio

from ferryman.settings.workers import PrefillSettings
from ferryman.worker.worker_app import WorkerKind, serve_worker
from ferryman_prefill.server import SERVICE, PrefillServicer

ROLE = "prefill"


async def serve(settings: PrefillSettings, stopping: asyncio.Event) -> None:
    """Serves until `stopping` is set and every attempt has ended."""
    kind = WorkerKind(ROLE, (SERVICE,), PrefillServicer)
    await serve_worker(settings, settings.engine, kind, stopping)
