"""`python -m ferryman_both`: the worker that does both as a process."""

from __future__ import annotations

import asyncio

from ferryman.runtime.collection import importing

with importing():
    from ferryman.runtime.life import run_main
    from ferryman.settings.workers import BothSettings
    from ferryman.worker.worker_app import WorkerKind, serve_worker
    from ferryman_both.server import SERVICES, BothServicer

ROLE = "both"


async def serve(settings: BothSettings, stopping: asyncio.Event) -> None:
    """Serves until `stopping` is set and every request has its last token."""
    kind = WorkerKind(ROLE, SERVICES, BothServicer)
    await serve_worker(settings, settings.engine, kind, stopping)


if __name__ == "__main__":
    run_main(BothSettings, ROLE, serve)
