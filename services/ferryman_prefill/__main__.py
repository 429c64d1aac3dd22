"""`python -m ferryman_prefill`: the prefill worker as a process."""

from __future__ import annotations

import asyncio

from ferryman.runtime.collection import importing

with importing():
    from ferryman.runtime.life import run_main
    from ferryman.settings.workers import PrefillSettings
    from ferryman.worker.worker_app import WorkerKind, serve_worker
    from ferryman_prefill.server import SERVICE, PrefillServicer

ROLE = "prefill"


async def serve(settings: PrefillSettings, stopping: asyncio.Event) -> None:
    """Serves until `stopping` is set and every attempt has ended."""
    kind = WorkerKind(ROLE, (SERVICE,), PrefillServicer)
    await serve_worker(settings, settings.engine, kind, stopping)


if __name__ == "__main__":
    run_main(PrefillSettings, ROLE, serve)
