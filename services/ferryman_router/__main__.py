"""`python -m ferryman_router`: settings from FERRYMAN_*, then serve until told to stop."""

from __future__ import annotations

from ferryman.runtime.collection import importing

if __name__ == "__main__":
    with importing():
        from ferryman.runtime.life import run_main
        from ferryman.settings.router import RouterSettings
        from ferryman_router.service import serve
    run_main(RouterSettings, "router", serve)
