"""The lock of a state folder: one `ferryman up` holds it, and its process id stands in the file.

The kernel drops the lock of a process that died, so the id counts only while the lock is held.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = "lock"


@contextmanager
def held_lock(folder: Path, pid: int) -> Iterator[None]:
    """Holds the lock for the length of a block. Raises BlockingIOError if another process has it,
    and OSError for a folder that takes no file."""
    with (folder / LOCK).open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.truncate(0)
        file.write(f"{pid}\n")
        file.flush()
        yield


def holder_of(folder: Path) -> int:
    """The id of the process that holds the lock; 0 if none does."""
    try:
        with (folder / LOCK).open("r") as file:
            try:
                # Shared: two commands that look at once do not take each other for a cluster.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                text = file.read().strip()
                return int(text) if text.isdecimal() else 0
    except OSError:
        pass
    return 0
