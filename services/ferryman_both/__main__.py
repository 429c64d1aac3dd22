"""`python -m ferryman_both`"""

from __future__ import annotations

from ferryman.runtime.collection import importing

if __name__ == "__main__":
    with importing():
        from ferryman.runtime.life import run_main
        from ferryman.settings.workers import BothSettings
        from ferryman_both.service import ROLE, serve
    run_main(BothSettings, ROLE, serve)
