"""`ferryman up`: a whole cluster as child processes, for as long as this one runs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from ferryman.errors import ConfigError
from ferryman.runtime.life import EXIT_FAILED, EXIT_MISCONFIGURED, alongside
from ferryman.wire.host_arena import sweep_stale_arenas
from ferryman_cli.child import Ended, Said
from ferryman_cli.choices import Choices, check
from ferryman_cli.greeting import greeting
from ferryman_cli.host_plan import HostPlan, host_plans
from ferryman_cli.readiness import serving
from ferryman_cli.roster import Roster, roster
from ferryman_cli.state_folder import Cluster, StateFolder
from ferryman_cli.supervisor import GivenUp, Supervisor, with_environment

EXIT_STOPPED = 0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
READY_SECONDS = 60.0
ECHO_SECONDS = 1.0

Announce = Callable[[Cluster, Sequence[HostPlan]], None]


class _Stopped(Exception):
    """Somebody asked for the end."""


def run_up(choices: Choices, state_dir: Path, *, as_json: bool) -> int:
    """Runs until it is told to stop; the exit status."""
    check(choices)
    folder = StateFolder(state_dir)
    with folder.locked():
        for old in folder.logs.glob("*.log"):
            old.unlink()
        announce = _announce_json if as_json else _announcer(folder)
        try:
            return asyncio.run(_Up(choices, folder).run(announce))
        finally:
            folder.forget()
            sweep_stale_arenas()


class _Up:
    """One cluster, from its start to its end."""

    def __init__(self, choices: Choices, folder: StateFolder) -> None:
        self._choices, self._folder = choices, folder
        self._roster: Roster = roster(choices, folder)
        self._supervisor = Supervisor(folder, os.environ, say=_say, changed=self._write)
        self._stopping = asyncio.Event()
        self._signalled: dict[signal.Signals, float] = {}
        self._doors: Said = {}
        self._plans: tuple[HostPlan, ...] = ()

    async def run(self, announce: Announce) -> int:
        self._end_on_signals()
        status = EXIT_STOPPED
        try:
            async with alongside(self._raise_when_stopped()):
                await self._start()
                announce(self._cluster(), self._plans)
                await self._supervisor.watch()
        except BaseExceptionGroup as group:
            status = _status_of(group)
        if status == EXIT_STOPPED:
            _say("draining; asked once more it kills")
        ended_well = await self._supervisor.drain(self._choices.drain_seconds)
        return status if ended_well or status else EXIT_FAILED

    async def _start(self) -> None:
        if sys.stderr.isatty():
            _say("starting")
        await self._supervisor.start(self._roster.servers)
        said = await self._supervisor.start(self._roster.services)
        self._doors = said["router"]
        self._pin_doors()
        async with asyncio.timeout(READY_SECONDS):
            await serving(self._doors["http"])
        caches = [said[name]["address"] for name in sorted(said) if name.startswith("hostcache")]
        self._plans = await host_plans(caches, self._choices.tiers.node_storage_bytes)
        self._write()

    def _pin_doors(self) -> None:
        """A router that is started again listens where its clients know it."""
        job = next(job for job in self._roster.services if job.name == "router")
        ports = {
            f"FERRYMAN_ROUTER_{door.upper()}__PORT": self._doors[door].rpartition(":")[2]
            for door in ("http", "grpc")
        }
        self._supervisor.pin(with_environment(job, ports))

    def _cluster(self) -> Cluster:
        return Cluster(
            http=f"http://{self._doors['http']}",
            grpc=self._doors["grpc"],
            nats=self._roster.nats_url,
            redis=self._roster.redis_url,
            name=self._choices.cluster,
            model=self._choices.served_name,
            up_pid=os.getpid(),
            pids=self._supervisor.pids,
        )

    def _write(self) -> None:
        self._folder.write(self._cluster())

    async def _raise_when_stopped(self) -> None:
        await self._stopping.wait()
        raise _Stopped

    def _end_on_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        """The same signal again is impatience, unless it is an echo: make passes on what the
        terminal sent to all."""
        now = asyncio.get_running_loop().time()
        if now - self._signalled.setdefault(number, now) > ECHO_SECONDS:
            self._supervisor.hurry()
        self._stopping.set()


def _status_of(group: BaseExceptionGroup[BaseException]) -> int:
    """What the end means; says a line for everything but a stop that was asked for."""
    if group.subgroup(_Stopped) is not None:
        return EXIT_STOPPED
    if mistakes := _messages(group, ConfigError):
        _error(mistakes[0])
        return EXIT_MISCONFIGURED
    known = _messages(group, (Ended, GivenUp))
    late = _messages(group, TimeoutError)
    if not known and not late:
        raise group
    _error(known[0] if known else f"the router was not ready within {READY_SECONDS:g} s")
    return EXIT_FAILED


def _messages(
    group: BaseExceptionGroup[BaseException],
    kinds: type[BaseException] | tuple[type[BaseException], ...],
) -> list[str]:
    found: list[str] = []
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            found += _messages(error, kinds)
        elif isinstance(error, kinds):
            found.append(str(error))
    return found


def _announce_json(cluster: Cluster, plans: Sequence[HostPlan]) -> None:
    line: Mapping[str, object] = {
        "event": "ready",
        "http": cluster.http,
        "grpc": cluster.grpc,
        "nats": cluster.nats,
        "redis": cluster.redis,
        "pids": dict(cluster.pids),
        "tiers": [asdict(plan) for plan in plans],
    }
    print(json.dumps(line), flush=True)


def _announcer(folder: StateFolder) -> Announce:
    def announce(cluster: Cluster, plans: Sequence[HostPlan]) -> None:
        print(greeting(cluster, folder.path, sys.argv[0], plans), flush=True)

    return announce


def _say(line: str) -> None:
    print(f"ferryman: {line}", file=sys.stderr, flush=True)


def _error(line: str) -> None:
    print(f"error: {line}", file=sys.stderr, flush=True)
