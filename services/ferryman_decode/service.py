"""The decode worker as a process."""

from __future__ import annotations

import asyncio

from pydantic import Field

from ferryman.runtime.settings import settings_config
from ferryman.worker.settings import engine_options
from ferryman.worker.shell import ShellSettings, serve_worker
from ferryman_decode.server import SERVICE, Decode

ROLE = "decode"


class DecodeSettings(ShellSettings):
    """`FERRYMAN_DECODE_*`. `max_reserved` hand-offs may be under way at once."""

    model_config = settings_config(ROLE)
    max_reserved: int = Field(default=8, ge=1)


async def serve(settings: DecodeSettings, stopping: asyncio.Event) -> None:
    """Until `stopping` is set and every request has its last token."""
    options = engine_options(
        settings.worker,
        max_prealloc=settings.max_reserved,
        draft_tokens=settings.worker.draft_tokens,
    )
    await serve_worker(settings, options, ROLE, Decode, SERVICE, stopping)
