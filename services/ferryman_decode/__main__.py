"""`python -m ferryman_decode`"""

from __future__ import annotations

from ferryman.runtime.main import run_main
from ferryman.settings.workers import DecodeSettings
from ferryman_decode.service import ROLE, serve

if __name__ == "__main__":
    run_main(DecodeSettings, ROLE, serve)
