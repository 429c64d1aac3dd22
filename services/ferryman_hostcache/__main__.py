"""`python -m ferryman_hostcache`: settings from FERRYMAN_HOSTCACHE_*, then serve until stopped."""

from __future__ import annotations

from ferryman.runtime.main import run_main
from ferryman_hostcache.service import serve
from ferryman_hostcache.settings import Settings


def main() -> None:
    run_main(Settings, serve)


if __name__ == "__main__":
    main()
