"""Processes that other processes have started."""

from __future__ import annotations

from pathlib import Path


def ranks_of(pid: int) -> list[int]:
    """The ranks beside the first that a process has started and not yet seen the end of."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    lines = {int(child): Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
    return [
        child for child, line in lines.items() if b"ferryman.engine.tensor_parallel.rank" in line
    ]
