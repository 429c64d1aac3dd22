"""The worker that does both, as a process."""

from __future__ import annotations

import asyncio

from ferryman.settings.workers import BothSettings
from ferryman.wire.nats.heartbeat import BOTH
from ferryman.worker.worker_app import WorkerKind, serve_worker
from ferryman_both.server import SERVICES, BothServicer

ROLE = BOTH


async def serve(settings: BothSettings, stopping: asyncio.Event) -> None:
    """Serves until `stopping` is set and every request has its last token."""
    kind = WorkerKind(ROLE, SERVICES, BothServicer)
    await serve_worker(settings, settings.engine, kind, stopping)
