"""`python -m ferryman_launcher.exec_with_parent PARENT_PID COMMAND …` becomes COMMAND.

It ends when its parent ends.

For servers of other projects: the kernel's parent-death signal (see `ferryman.runtime.parent`)
stays set after exec, and so does the slack of timers.
"""

from __future__ import annotations

import os
import sys

from ferryman.runtime.parent import end_with_parent, prctl

_PR_SET_TIMERSLACK = 29
# NATS' Go looks every 20 µs, as long as anything runs, whether a goroutine takes too long; at each
# message and ten times a second besides. No timer of a broker needs to be better than this.
TIMER_SLACK_NANOSECONDS = 1_000_000


def with_parent(argv: tuple[str, ...], parent_pid: int) -> tuple[str, ...]:
    """The command that runs `argv` and ends it with `parent_pid`."""
    return (sys.executable, "-m", "ferryman_launcher.exec_with_parent", str(parent_pid), *argv)


def main() -> None:
    parent_pid, *argv = sys.argv[1:]
    end_with_parent(int(parent_pid))
    if sys.platform == "linux":
        prctl(_PR_SET_TIMERSLACK, TIMER_SLACK_NANOSECONDS)
    os.execv(argv[0], argv)


if __name__ == "__main__":
    main()
