"""`python -m ferryman_hostcache`: settings from FERRYMAN_*, then serve until stopped."""

from __future__ import annotations

from ferryman.runtime.collection import importing


def main() -> None:
    with importing():
        from ferryman.runtime.life import run_main
        from ferryman.settings.hostcache import HostCacheServiceSettings
        from ferryman_hostcache.service import serve
    run_main(HostCacheServiceSettings, "hostcache", serve)


if __name__ == "__main__":
    main()
