"""`python -m ferryman_launcher.exec_with_parent PARENT_PID COMMAND …` becomes COMMAND.

It ends when its parent ends.

For servers of other projects: the kernel's parent-death signal (see `ferryman.runtime.parent`)
stays set after exec.
"""

from __future__ import annotations

import os
import sys

from ferryman.runtime.parent import end_with_parent


def with_parent(argv: tuple[str, ...], parent_pid: int) -> tuple[str, ...]:
    """The command that runs `argv` and ends it with `parent_pid`."""
    return (sys.executable, "-m", "ferryman_launcher.exec_with_parent", str(parent_pid), *argv)


def main() -> None:
    parent_pid, *argv = sys.argv[1:]
    end_with_parent(int(parent_pid))
    os.execv(argv[0], argv)


if __name__ == "__main__":
    main()
