"""A service that was started by `ferryman up` never outlives it, however that ended.

Linux sends the signal itself (prctl(2), PR_SET_PDEATHSIG), even when the event loop is stuck. It
does so when the *thread* that forked dies: start children from the main thread. Other systems have
no such call; there only an orphan at birth is noticed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent_pid: int) -> None:
    """Has SIGTERM sent to this process when its parent ends; at once when that has happened.

    `parent_pid` is who the starter said it was: by now this process may have been adopted.
    """
    if sys.platform == "linux":
        _ask_for_signal()
    if is_orphaned(parent_pid):
        signal.raise_signal(signal.SIGTERM)


def is_orphaned(parent_pid: int) -> bool:
    return os.getppid() != parent_pid


def _ask_for_signal() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
