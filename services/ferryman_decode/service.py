"""The decode worker as a process."""

from __future__ import annotations

import asyncio

from ferryman.settings.workers import DecodeSettings
from ferryman.worker.worker_app import WorkerKind, serve_worker
from ferryman_decode.server import SERVICE, DecodeServicer

ROLE = "decode"


async def serve(settings: DecodeSettings, stopping: asyncio.Event) -> None:
    """Serves until `stopping` is set and every request has its last token."""
    kind = WorkerKind(ROLE, (SERVICE,), DecodeServicer)
    await serve_worker(settings, settings.engine, kind, stopping)
