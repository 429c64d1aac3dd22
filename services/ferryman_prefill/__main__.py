"""`python -m ferryman_prefill`"""

from __future__ import annotations

from ferryman.runtime.collection import importing

if __name__ == "__main__":
    with importing():
        from ferryman.runtime.life import run_main
        from ferryman.settings.workers import PrefillSettings
        from ferryman_prefill.service import ROLE, serve
    run_main(PrefillSettings, ROLE, serve)
