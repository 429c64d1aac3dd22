"""`python -m ferryman_router`: settings from FERRYMAN_ROUTER_*, then serve until told to stop."""

from __future__ import annotations

from ferryman.runtime.main import run_main
from ferryman_router.service import serve
from ferryman_router.settings import RouterSettings

if __name__ == "__main__":
    run_main(RouterSettings, serve)
