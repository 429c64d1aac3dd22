"""Processes as the kernel shows them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

FORKED = "ferryman-rank"
"""The name of a rank that a test has forked."""


def ranks_of(pid: int) -> list[int]:
    """The ranks beside the first that a process has started and not yet seen the end of."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = []
    for child in children:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            line = Path(f"/proc/{child}/cmdline").read_bytes()
            name = Path(f"/proc/{child}/comm").read_text().strip()
            if b"ferryman.engine.tensor_parallel.rank" in line or name == FORKED:
                found.append(int(child))
    return found


def process_state(pid: int) -> str:
    """One letter of /proc/PID/stat, such as T for a process that is stopped; X if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    return "X"
