"""`python -m ferryman_decode`"""

from __future__ import annotations

from ferryman.runtime.main import run_main
from ferryman_decode.service import DecodeSettings, serve

if __name__ == "__main__":
    run_main(DecodeSettings, serve)
