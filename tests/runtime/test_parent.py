"""A third-party server ends with the process that started it, even if that dies by SIGKILL."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest

from ferryman.runtime.parent import TIMER_SLACK_NANOSECONDS, with_parent

PARENT = """
import os, subprocess, sys
from ferryman.runtime.parent import with_parent
child = subprocess.Popen(with_parent(("/bin/sleep", "600"), os.getpid()))
print(child.pid, flush=True)
child.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals orphans")
def test_a_killed_parent_takes_its_servers_along() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        watched = os.pidfd_open(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    ended, _, _ = select.select([watched], [], [], 30)
    os.close(watched)
    assert ended


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a slack of timers")
def test_timers_of_a_server_may_be_late() -> None:
    command = with_parent(("/bin/cat", "/proc/self/timerslack_ns"), os.getpid())
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert int(said) == TIMER_SLACK_NANOSECONDS
