"""What every service's `main` does: read settings, set up logs, mind the parent, serve."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NoReturn, Protocol, TypeVar, cast

from pydantic_settings import BaseSettings

from ferryman.runtime.life import exit_on_config_errors, run_service
from ferryman.runtime.logs import configure_logs
from ferryman.runtime.parent import end_with_parent
from ferryman.runtime.settings import LifeSettings, read_settings

S = TypeVar("S", bound=BaseSettings)


class _HasLife(Protocol):
    @property
    def life(self) -> LifeSettings: ...


def run_main(kind: type[S], serve: Callable[[S, asyncio.Event], Awaitable[None]]) -> NoReturn:
    """Runs `serve(settings, stopping)` as a process; settings of `kind` have a group `life`."""
    with exit_on_config_errors():
        settings = read_settings(kind)
    life = cast("_HasLife", settings).life
    configure_logs(life.log_level)
    if life.parent_pid:
        end_with_parent(life.parent_pid)
    run_service(partial(serve, settings), drain_seconds=life.drain_seconds)
