"""`python -m ferryman_decode`"""

from __future__ import annotations

from ferryman.runtime.collection import importing

if __name__ == "__main__":
    with importing():
        from ferryman.runtime.life import run_main
        from ferryman.settings.workers import DecodeSettings
        from ferryman_decode.service import ROLE, serve
    run_main(DecodeSettings, ROLE, serve)
