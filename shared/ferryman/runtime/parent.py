"""Ends a service when the `ferryman up` that started it ends, for any reason.

Linux sends the signal itself (prctl(2), PR_SET_PDEATHSIG), even when the event loop is stuck. It
does so when the *thread* that forked dies, so start children from the main thread. Other systems
have no such call; there the service only notices a parent that is already gone at the start.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent_pid: int) -> None:
    """Requests SIGTERM for this process when its parent ends; sends it at once if the parent is
    gone.

    `parent_pid` is the parent's id as the parent gave it: this process may be adopted by now.
    """
    if sys.platform == "linux":
        _request_end_signal()
    if is_orphaned(parent_pid):
        signal.raise_signal(signal.SIGTERM)


def is_orphaned(parent_pid: int) -> bool:
    return os.getppid() != parent_pid


def _request_end_signal() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
