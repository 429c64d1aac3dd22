"""Other people's load on the machine, and what each process takes of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class BusyProcesses:
    """Processes that take all the time that they get, while the block lasts."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._processes: list[subprocess.Popen[bytes]] = []
        self._seconds: dict[int, float] = {}

    def __enter__(self) -> Self:
        command = [sys.executable, "-c", "while True: pass"]
        self._processes = [subprocess.Popen(command) for _ in range(self._number)]
        self._seconds = dict.fromkeys((process.pid for process in self._processes), 0.0)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def check(self) -> float:
        """The seconds that they had since the last look, all together; raises AssertionError unless
        each of them ran meanwhile."""
        had = 0.0
        for process in self._processes:
            assert process.poll() is None, "a busy process has ended"
            seconds = cpu_seconds({"busy": process.pid})["busy"]
            assert seconds > self._seconds[process.pid], "a busy process stood still"
            had += seconds - self._seconds[process.pid]
            self._seconds[process.pid] = seconds
        return had


def cpu_seconds(pids: Mapping[str, int]) -> dict[str, float]:
    """The seconds of processor time that each process has had, with all its threads."""
    seconds = {}
    for name, pid in pids.items():
        # The command's name stands in brackets, and may hold spaces.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        seconds[name] = (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND
    return seconds
