"""Ends a service when the `ferryman up` that started it ends, for any reason; adopts processes.

Linux sends the signal itself (prctl(2), PR_SET_PDEATHSIG), even when the event loop is stuck. It
does so when the *thread* that forked dies, so start children from the main thread. Other systems
have no such call; there the service only notices a parent that is already gone at the start.

`python -m ferryman.runtime.parent PARENT_PID COMMAND …` becomes COMMAND, a server of another
project, which ends when its parent ends: the signal stays set after exec, and so does the slack of
timers.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_TIMERSLACK = 29
# NATS' Go looks every 20 µs, as long as anything runs, whether a goroutine takes too long; at each
# message and ten times a second besides. No timer of a broker needs to be better than this.
TIMER_SLACK_NANOSECONDS = 1_000_000


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


@contextmanager
def adopting() -> Iterator[None]:
    """For the length of a block, descendants that lose their parent become children of this
    process (prctl(2), PR_SET_CHILD_SUBREAPER). Linux alone. Raises OSError.

    No longer than needed: nothing here waits for the end of a stranger's process.
    """
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _request_end_signal() -> None:
    prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


def prctl(option: int, value: int) -> None:
    """Linux's call of that name. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def with_parent(argv: tuple[str, ...], parent_pid: int) -> tuple[str, ...]:
    """The command that runs `argv` and ends it with `parent_pid`."""
    return (sys.executable, "-m", "ferryman.runtime.parent", str(parent_pid), *argv)


def main() -> None:
    parent_pid, *argv = sys.argv[1:]
    end_with_parent(int(parent_pid))
    if sys.platform == "linux":
        prctl(_PR_SET_TIMERSLACK, TIMER_SLACK_NANOSECONDS)
    os.execv(argv[0], argv)


if __name__ == "__main__":
    main()
