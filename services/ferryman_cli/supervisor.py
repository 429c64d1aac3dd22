"""Keeps the processes of a cluster running, and ends them in order.

A process that dies is started again after a pause; one that will not live ends the cluster. Nothing
here outlives it: `drain` is the way out of every block that started something.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import groupby
from time import monotonic

from ferryman.errors import ConfigError
from ferryman_cli.child import Child, Ended, Job, Said, spawn
from ferryman_cli.restarts import Restarts
from ferryman_cli.state_folder import StateFolder

KILL_GRACE_SECONDS = 5.0

Say = Callable[[str], None]


class GivenUp(Exception):
    """A process that the cluster needs does not stay alive."""


class Supervisor:
    """`changed` is called after every restart, when process ids are new."""

    def __init__(
        self,
        folder: StateFolder,
        environment: Mapping[str, str],
        *,
        say: Say,
        start_seconds: float = 120.0,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder, self._environment = folder, environment
        self._say, self._start_seconds, self._changed = say, start_seconds, changed
        self._children: dict[str, Child] = {}
        self._is_hurried = False

    @property
    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self._children.items()}

    async def start(self, jobs: Iterable[Job]) -> dict[str, Said]:
        """Starts jobs side by side; what each said when it was ready.

        Raises ConfigError or Ended, alone in its group, as soon as one cannot be.
        """
        async with asyncio.TaskGroup() as group:
            starting = {job.name: group.create_task(self._start(job)) for job in jobs}
        return {name: task.result() for name, task in starting.items()}

    def pin(self, job: Job) -> None:
        """Restarts use this job from now on, in place of the one of its name."""
        self._children[job.name].job = job

    async def watch(self) -> None:
        """For ever. Raises GivenUp when a process is beyond help."""
        async with asyncio.TaskGroup() as group:
            for name in self._children:
                group.create_task(self._keep_alive(name))

    async def drain(self, seconds: float) -> bool:
        """Ends everything, router first and servers last; whether all ended well."""
        ended_well = True
        by_rank = sorted(self._children.values(), key=lambda child: child.job.drain_rank)
        for _, children in groupby(by_rank, key=lambda child: child.job.drain_rank):
            grace = 0.0 if self._is_hurried else seconds + KILL_GRACE_SECONDS
            running = [child for child in children if child.is_running]
            async with asyncio.TaskGroup() as group:
                stopping = [group.create_task(child.stop(grace)) for child in running]
            ended_well &= all(task.result() for task in stopping)
        return ended_well

    def hurry(self) -> None:
        """Kills everything, now."""
        self._is_hurried = True
        for child in self._children.values():
            child.kill()

    async def _start(self, job: Job) -> Said:
        log_path = self._folder.log_path(job.name)
        child = await spawn(job, log_path, self._environment)
        self._children[job.name] = child
        return await child.ready(self._start_seconds)

    async def _keep_alive(self, name: str) -> None:
        restarts = Restarts()
        while True:
            how = await self._children[name].ended()
            pause = restarts.died(monotonic())
            if pause is None:
                raise GivenUp(f"{name} {how} again and again; see {self._folder.log_path(name)}")
            self._say(f"{name} {how}; starting it again")
            await asyncio.sleep(pause)
            await self._start_again(name, restarts)

    async def _start_again(self, name: str, restarts: Restarts) -> None:
        began = monotonic()
        try:
            await self._start(self._children[name].job)
        except ConfigError as error:
            raise GivenUp(str(error)) from error
        except Ended as error:
            self._say(str(error))
            restarts.failed_to_start()
            self._children[name].kill()
            return
        restarts.was_ready()
        self._say(f"{name} is back after {monotonic() - began:.1f} s")
        self._changed()


def with_environment(job: Job, more: Mapping[str, str]) -> Job:
    """The same job with some variables set otherwise."""
    return replace(job, environment={**job.environment, **more})
