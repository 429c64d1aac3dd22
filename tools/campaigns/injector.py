"""Faults for processes of `ferryman up`: stopped for a while, or killed; each seen to happen."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tools.campaigns.outages import Absences

from ferryman_launcher.state_folder import running_cluster

BACK_SECONDS = 120.0
LOOK_SECONDS = 0.02


class NoEffect(Exception):
    """A fault that was injected did not happen, or a process did not come back."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How many faults, how often, and of which kind. Seconds of a stop are drawn log-uniformly."""

    num_faults: int
    seconds_between: float
    kill_share: float = 0.35
    min_stop_seconds: float = 0.3
    max_stop_seconds: float = 20.0


@dataclass(frozen=True, slots=True)
class Target:
    """A running `ferryman up`: its state folder, and the file with what it says."""

    state_dir: Path
    log: Path

    def pid(self, name: str) -> int:
        """Of the latest process of that name, which may still be on its way to being ready."""
        return int(running_cluster(self.state_dir).pids[name])

    def num_returns(self, name: str) -> int:
        """How often that process has died and was ready again."""
        return self.log.read_text().count(f"{name} is back after")


class Injector:
    """Injects faults into whatever runs there; `absences` says what was away when."""

    def __init__(self, target: Target, absences: Absences, plan: Plan, rng: random.Random) -> None:
        self._target, self._plan, self._rng = target, plan, rng
        self.absences = absences
        self.faults: Counter[str] = Counter()

    @property
    def num_done(self) -> int:
        return self.faults.total()

    async def run(self) -> None:
        """Injects all faults; returns when every process is back."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._plan.num_faults):
                await asyncio.sleep(self._rng.expovariate(1 / self._plan.seconds_between))
                group.create_task(self._inject(await self._victim()))

    async def _victim(self) -> str:
        """A process without a current fault; it counts as away from now on."""
        while not (free := [n for n in self.absences.names if not self.absences.is_away(n)]):
            await asyncio.sleep(LOOK_SECONDS)
        name = self._rng.choice(free)
        self.absences.left(name, time.monotonic())
        return name

    async def _inject(self, name: str) -> None:
        pid = self._target.pid(name)
        if self._rng.random() < self._plan.kill_share:
            await self._kill(name, pid)
        else:
            await self._stop(name, pid)
        self.absences.came_back(name, time.monotonic())

    async def _kill(self, name: str, pid: int) -> None:
        num_returns = self._target.num_returns(name)
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(BACK_SECONDS):
            # It says that one is back a moment before it writes down where.
            while self._target.num_returns(name) == num_returns or self._target.pid(name) == pid:
                await asyncio.sleep(LOOK_SECONDS)
        self.faults[f"SIGKILL {name}"] += 1

    async def _stop(self, name: str, pid: int) -> None:
        low, high = self._plan.min_stop_seconds, self._plan.max_stop_seconds
        seconds = low * (high / low) ** self._rng.random()
        os.kill(pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(5):
                while _state(pid) != "T":
                    await asyncio.sleep(LOOK_SECONDS)
            await asyncio.sleep(seconds)
            if _state(pid) != "T":
                raise NoEffect(f"{name} ({pid}) ran on though it was stopped")
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.faults[f"SIGSTOP {name}"] += 1


def _state(pid: int) -> str:
    """The process's state as one letter of /proc/PID/stat; X if it has ended."""
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    return "X"
