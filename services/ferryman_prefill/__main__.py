"""`python -m ferryman_prefill`"""

from __future__ import annotations

from ferryman.runtime.main import run_main
from ferryman_prefill.service import PrefillSettings, serve

if __name__ == "__main__":
    run_main(PrefillSettings, serve)
