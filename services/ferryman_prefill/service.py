"""The prefill worker as a process."""

from __future__ import annotations

import asyncio

from ferryman.runtime.settings import settings_config
from ferryman.worker.settings import engine_options
from ferryman.worker.shell import ShellSettings, serve_worker
from ferryman_prefill.server import SERVICE, Prefill

ROLE = "prefill"


class PrefillSettings(ShellSettings):
    """`FERRYMAN_PREFILL_*`."""

    model_config = settings_config(ROLE)


async def serve(settings: PrefillSettings, stopping: asyncio.Event) -> None:
    """Until `stopping` is set and every attempt has ended."""
    # Prompts that wait for their commit need rows beside those that are being computed.
    options = engine_options(settings.worker, max_prealloc=settings.worker.max_running)
    await serve_worker(settings, options, ROLE, Prefill, SERVICE, stopping)
