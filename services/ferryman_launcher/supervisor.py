"""Keeps the processes of a cluster running, and ends them in order.

The first start ends with an error if all processes of a role fail in it. From then on no death ends
the cluster: a process that dies is started again after a pause, for ever, and each death is
reported. No process outlives the supervisor: every block that starts one ends with `drain`.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import groupby

from ferryman.errors import ConfigError
from ferryman_launcher.child import Child, ChildEnded, ChildSpec, Launch, execute, spawn
from ferryman_launcher.readiness import ReadyEvent, StartReport
from ferryman_launcher.restarts import LifeEnd, Restart, RestartLimits, next_restart
from ferryman_launcher.state_folder import StateFolder
from ferryman_launcher.write_failures import ChildLog, WriteFailures

KILL_GRACE_SECONDS = 5.0

Say = Callable[[str], None]
OnLoadOf = Callable[[str, StartReport], None]


class Supervisor:
    """Calls `changed` after every death and after every restart, when process ids are new."""

    def __init__(
        self,
        folder: StateFolder,
        environment: Mapping[str, str],
        *,
        say: Say,
        limits: RestartLimits | None = None,
        changed: Callable[[], None] = lambda: None,
        on_load: OnLoadOf = lambda name, report: None,
        launch: Launch = execute,
    ) -> None:
        self._folder, self._environment, self._launch = folder, environment, launch
        self._say, self._changed, self._on_load = say, changed, on_load
        self._limits = limits or RestartLimits()
        self.write_failures = WriteFailures(say)
        self._children: dict[str, Child] = {}
        self._jobs: dict[str, ChildSpec] = {}
        self._num_deaths: dict[str, int] = {}
        self._ready_since: dict[str, float] = {}
        self._ready_events: dict[str, ReadyEvent] = {}
        self._first_failures: dict[str, ConfigError | ChildEnded] = {}
        self._down: dict[str, str] = {}
        self._is_hurried = False

    @property
    def pids(self) -> dict[str, int]:
        """The latest process id of each."""
        return {name: child.pid for name, child in self._children.items()}

    @property
    def down(self) -> dict[str, str]:
        """The processes that ended and are not ready again, each with how it ended."""
        return dict(self._down)

    @property
    def ready_events(self) -> Mapping[str, ReadyEvent]:
        """The latest event of each process that was ready at least once."""
        return self._ready_events

    async def start(self, jobs: Iterable[ChildSpec]) -> dict[str, ReadyEvent]:
        """Starts processes side by side; returns the ready event of each.

        Raises ConfigError or ChildEnded, alone in its group, as soon as no process of a role can
        start. A process with others of its role is reported; `watch` goes on trying it.
        """
        starting = {job.name: job for job in jobs}
        self._jobs |= starting
        async with asyncio.TaskGroup() as group:
            tasks = {name: group.create_task(self._start_first(name)) for name in starting}
        return {name: event for name, task in tasks.items() if (event := task.result()) is not None}

    def pin(self, job: ChildSpec) -> None:
        """Restarts use this spec from now on, in place of the one with its name."""
        self._jobs[job.name] = job

    def send(self, name: str, number: signal.Signals) -> None:
        """Sends a signal to a process, if it runs: while it is down, its id may be another's."""
        if (child := self._children.get(name)) is not None:
            child.send(number)

    async def watch(self) -> None:
        """Starts what dies again, for ever."""
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
            self._first_failures[name] = error
            if all(other in self._first_failures for other in self._stand_ins(name)):
                raise
            self._say(f"WARNING: {error}; the others of its role are started without it")
            return None

    async def _start(self, name: str) -> ReadyEvent:
        """Raises ConfigError or ChildEnded; then the process is gone, or will be in a moment."""
        job, on_load = self._jobs[name], partial(self._on_load, name)
        try:
            log = ChildLog(self._folder.log_path(name), self.write_failures)
            child = await spawn(job, log, self._environment, on_load, self._launch)
        except OSError as error:
            raise ChildEnded(f"{name} could not be started: {error}") from error
        self._children[name] = child
        try:
            event = await child.ready(self._limits.standstill_seconds)
        except ChildEnded:
            child.kill()
            raise
        self._ready_since[name] = _now()
        self._ready_events[name] = event
        self._down.pop(name, None)
        return event

    async def _keep_alive(self, name: str) -> None:
        failure = self._first_failures.get(name)
        end = _failed_start(name, failure) if failure else await self._end_of_life(name)
        while True:
            restart = next_restart(self._limits, self._num_deaths.get(name, 0), end)
            self._num_deaths[name] = restart.num_deaths
            self._down[name] = end.reason
            self._report(name, end, restart)
            self._changed()
            await asyncio.sleep(restart.pause_seconds)
            end = await self._next_life(name)

    async def _next_life(self, name: str) -> LifeEnd:
        """Starts the process and waits for its end."""
        began = _now()
        try:
            await self._start(name)
        except (ConfigError, ChildEnded) as error:
            # Its port is free for the next one only when it is gone.
            if (child := self._children.get(name)) is not None:
                await child.ended()
            return _failed_start(name, error)
        self._say(f"{name} is back after {_now() - began:.1f} s")
        self._changed()
        return await self._end_of_life(name)

    async def _end_of_life(self, name: str) -> LifeEnd:
        """Waits for the end of a process that was ready."""
        child = self._children[name]
        reason = await child.ended()
        seconds = _now() - self._ready_since.pop(name)
        return LifeEnd(reason, seconds, last_lines=child.last_lines())

    def _report(self, name: str, end: LifeEnd, restart: Restart) -> None:
        """Says how a process ended, what that means for callers, and when it is started again."""
        pause = f"{restart.pause_seconds:.3g} s"
        text = f"{name} {end.reason}; starting it again in {pause}"
        if restart.is_crash_loop:
            serving = ", ".join(
                other for other in self._stand_ins(name) if other in self._ready_since
            )
            meanwhile = f"{serving} serves" if serving else self._jobs[name].absence
            text = (
                f"WARNING: {name} {end.reason}, death {restart.num_deaths} in a row (see "
                f"{self._folder.log_path(name)}); {meanwhile}; trying again in {pause}"
            )
        self._say("".join((text, *(f"\n    {name}: {line}" for line in end.last_lines))))

    def _stand_ins(self, name: str) -> list[str]:
        """The other processes of its role."""
        role = self._jobs[name].role or name
        return [other for other, job in self._jobs.items() if other != name and job.role == role]


def _now() -> float:
    return asyncio.get_running_loop().time()


def _failed_start(name: str, error: ConfigError | ChildEnded) -> LifeEnd:
    """The message of the error has the name and the last line of its output."""
    reason = str(error).removeprefix(f"{name}: ").removeprefix(f"{name} ")
    if isinstance(error, ConfigError):
        return LifeEnd(f"refuses to start: {reason}", is_refusal=True)
    return LifeEnd(reason)


def with_environment(job: ChildSpec, more: Mapping[str, str]) -> ChildSpec:
    """The same spec with some variables changed."""
    return replace(job, environment={**job.environment, **more})
