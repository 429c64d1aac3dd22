"""A peer that stands still behind a network blocks its writer for a limited time only."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.wire import standing_still

from ferryman.wire.handoff.nixl_library import has_nixl


@pytest.mark.skipif(not has_nixl(), reason="ferryman[nixl] is not installed")
def test_a_write_that_stands_still_ends_with_its_connection_and_the_next_one_lands() -> None:
    command = [sys.executable, "-m", standing_still.__name__]
    environment = os.environ | {"UCX_TLS": "tcp"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.splitlines() == ["no NIXL write ended for 1.0 s", "landed"], done.stderr
