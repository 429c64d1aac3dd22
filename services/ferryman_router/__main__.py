"""`python -m ferryman_router`: settings from FERRYMAN_ROUTER_*, then serve until told to stop."""

from __future__ import annotations

from functools import partial

from ferryman.runtime.life import exit_on_config_errors, run_service
from ferryman.runtime.logs import configure_logs
from ferryman.runtime.parent import end_with_parent
from ferryman.runtime.settings import read_settings
from ferryman_router.service import serve
from ferryman_router.settings import RouterSettings


def main() -> None:
    with exit_on_config_errors():
        settings = read_settings(RouterSettings)
    configure_logs(settings.life.log_level)
    if settings.life.parent_pid:
        end_with_parent(settings.life.parent_pid)
    run_service(partial(serve, settings), drain_seconds=settings.life.drain_seconds)


if __name__ == "__main__":
    main()
