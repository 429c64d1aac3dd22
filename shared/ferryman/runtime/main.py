"""The common `main` of services: read settings, set up logs, watch the parent, serve."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NoReturn, Protocol, TypeVar, cast

from pydantic import BaseModel

from ferryman.runtime.life import exit_on_config_errors, run_service
from ferryman.runtime.logs import configure_logs
from ferryman.runtime.parent import end_with_parent
from ferryman.settings.groups import LifeSettings
from ferryman.settings.sources import Sources, read_settings

S = TypeVar("S", bound=BaseModel)


class _HasLife(Protocol):
    @property
    def life(self) -> LifeSettings: ...


def run_main(
    kind: type[S], role: str, serve: Callable[[S, asyncio.Event], Awaitable[None]]
) -> NoReturn:
    """Runs `serve(settings, stopping)` as a process; settings of `kind` have a group `life`."""
    with exit_on_config_errors():
        settings = read_settings(kind, role, Sources.of(os.environ))
    life = cast("_HasLife", settings).life
    configure_logs(life.log_level)
    if life.parent_pid:
        end_with_parent(life.parent_pid)
    run_service(partial(serve, settings), drain_seconds=life.drain_seconds)
