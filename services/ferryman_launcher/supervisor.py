"""Keeps the processes of a cluster running, and ends them in order.

A process that dies is started again after a pause. A hopeless one is reported, and tried again, as
long as another of its role serves or may still serve; otherwise it ends the cluster. No process
outlives the supervisor: every block that starts one ends with `drain`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import groupby
from time import monotonic

from ferryman.errors import ConfigError
from ferryman_launcher.child import Child, ChildEnded, ChildSpec, Launch, execute, spawn
from ferryman_launcher.readiness import ReadyEvent, StartReport
from ferryman_launcher.restarts import RestartLimits, Restarts
from ferryman_launcher.state_folder import StateFolder

KILL_GRACE_SECONDS = 5.0

Say = Callable[[str], None]
OnLoadOf = Callable[[str, StartReport], None]


class GivenUp(Exception):
    """No process of a role that the cluster needs stays alive."""


class Supervisor:
    """Calls `changed` after every restart, when process ids are new."""

    def __init__(
        self,
        folder: StateFolder,
        environment: Mapping[str, str],
        *,
        say: Say,
        patience: RestartLimits | None = None,
        changed: Callable[[], None] = lambda: None,
        on_load: OnLoadOf = lambda name, report: None,
        launch: Launch = execute,
    ) -> None:
        self._folder, self._environment, self._launch = folder, environment, launch
        self._say, self._changed, self._on_load = say, changed, on_load
        self._patience = patience or RestartLimits()
        self._children: dict[str, Child] = {}
        self._jobs: dict[str, ChildSpec] = {}
        self._restarts: dict[str, Restarts] = {}
        self._ready: set[str] = set()
        self._ready_events: dict[str, ReadyEvent] = {}
        self._failures: dict[str, str] = {}
        self._is_hurried = False

    @property
    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self._children.items()}

    @property
    def ready_events(self) -> Mapping[str, ReadyEvent]:
        """The latest of each process that was ready at least once."""
        return self._ready_events

    async def start(self, jobs: Iterable[ChildSpec]) -> dict[str, ReadyEvent]:
        """Starts processes side by side; returns the ready event of each.

        Raises ConfigError or ChildEnded, alone in its group, as soon as no process of a role can
        start. A process with others of its role is reported; `watch` goes on trying it.
        """
        starting = {job.name: job for job in jobs}
        self._jobs |= starting
        self._restarts |= {name: Restarts(self._patience) for name in starting}
        async with asyncio.TaskGroup() as group:
            tasks = {name: group.create_task(self._start_first(name)) for name in starting}
        return {name: said for name, task in tasks.items() if (said := task.result()) is not None}

    def pin(self, job: ChildSpec) -> None:
        """Restarts use this spec from now on, in place of the one with its name."""
        self._jobs[job.name] = job

    async def watch(self) -> None:
        """Runs for ever. Raises GivenUp when a whole role is hopeless."""
        async with asyncio.TaskGroup() as group:
            for name in self._jobs:
                group.create_task(self._keep_alive(name))

    async def drain(self, seconds: float) -> bool:
        """Ends everything, router first and servers last; returns whether all ended well."""
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
        """Kills every process, now."""
        self._is_hurried = True
        for child in self._children.values():
            child.kill()

    async def _start_first(self, name: str) -> ReadyEvent | None:
        try:
            return await self._start(name)
        except (ConfigError, ChildEnded) as error:
            if all(other in self._failures for other in self._stand_ins(name)):
                raise
            self._say(f"WARNING: {error}; the others of its role are started without it")
            return None

    async def _start(self, name: str) -> ReadyEvent:
        """Raises ConfigError or ChildEnded; then the process is gone, or will be in a moment."""
        job, log_path = self._jobs[name], self._folder.log_path(name)
        on_load = partial(self._on_load, name)
        try:
            child = await spawn(job, log_path, self._environment, on_load, self._launch)
        except OSError as error:
            raise self._failed(name, ChildEnded(f"{name} could not be started: {error}")) from error
        self._children[name] = child
        try:
            said = await child.ready(self._patience.standstill_seconds)
        except ConfigError as error:
            self._restarts[name].refused_to_start()
            raise self._failed(name, error) from None
        except ChildEnded as error:
            self._restarts[name].failed_to_start()
            child.kill()
            raise self._failed(name, error) from None
        self._restarts[name].was_ready(monotonic())
        self._failures.pop(name, None)
        self._ready.add(name)
        self._ready_events[name] = said
        return said

    def _failed(self, name: str, error: ConfigError | ChildEnded) -> ConfigError | ChildEnded:
        self._failures[name] = str(error)
        return error

    async def _keep_alive(self, name: str) -> None:
        restarts = self._restarts[name]
        while True:
            how = await self._ended(name)
            self._ready.discard(name)
            pause = restarts.died(monotonic())
            if restarts.is_hopeless:
                self._say(self._last_hope(name, how, pause))
            else:
                self._say(f"{name} {how}; starting it again")
            await asyncio.sleep(pause)
            await self._start_again(name)

    async def _ended(self, name: str) -> str:
        child = self._children.get(name)
        return await child.ended() if child is not None else "could not be started"

    def _last_hope(self, name: str, how: str, pause: float) -> str:
        """The warning about a hopeless process. Raises GivenUp when every process of its role is
        hopeless."""
        what = f"{name} {how} again and again; see {self._folder.log_path(name)}"
        others = self._stand_ins(name)
        if all(one not in self._ready and self._restarts[one].is_hopeless for one in others):
            raise GivenUp(self._failures.get(name, what))
        serve = ", ".join(sorted(self._ready & set(others))) or "no other of its role"
        return f"WARNING: {what}. {serve} serves; trying again in {pause:.0f} s"

    def _stand_ins(self, name: str) -> list[str]:
        """The other processes of its role."""
        role = self._jobs[name].role or name
        return [one for one, job in self._jobs.items() if one != name and job.role == role]

    async def _start_again(self, name: str) -> None:
        began = monotonic()
        try:
            await self._start(name)
        except (ConfigError, ChildEnded) as error:
            self._say(str(error))
            return
        self._say(f"{name} is back after {monotonic() - began:.1f} s")
        self._changed()


def with_environment(job: ChildSpec, more: Mapping[str, str]) -> ChildSpec:
    """The same spec with some variables changed."""
    return replace(job, environment={**job.environment, **more})
