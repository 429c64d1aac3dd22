"""`python -m ferryman_prefill`"""

from __future__ import annotations

from ferryman.runtime.main import run_main
from ferryman.settings.workers import PrefillSettings
from ferryman_prefill.service import ROLE, serve

if __name__ == "__main__":
    run_main(PrefillSettings, ROLE, serve)
