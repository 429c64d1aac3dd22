"""`python -m ferryman_cli.leash PARENT_PID COMMAND …` becomes COMMAND, which ends with its parent.

For servers that are not ours: the kernel's promise (see `ferryman.runtime.parent`) outlives exec.
"""

from __future__ import annotations

import os
import sys

from ferryman.runtime.parent import end_with_parent


def leashed(argv: tuple[str, ...], parent_pid: int) -> tuple[str, ...]:
    """The command that runs `argv` on the leash of `parent_pid`."""
    return (sys.executable, "-m", "ferryman_cli.leash", str(parent_pid), *argv)


def main() -> None:
    parent_pid, *argv = sys.argv[1:]
    end_with_parent(int(parent_pid))
    os.execv(argv[0], argv)


if __name__ == "__main__":
    main()
