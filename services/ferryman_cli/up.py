"""`ferryman up`: a whole cluster as child processes, for as long as this process runs."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator

from ferryman.errors import ConfigError
from ferryman.runtime.life import EXIT_FAILED, EXIT_MISCONFIGURED, alongside
from ferryman.security.credentials import ClusterRole
from ferryman.settings.cluster import UpOptions
from ferryman.settings.names import variable
from ferryman.wire.hostcache.arena import sweep_stale_arenas
from ferryman_cli.up_display import (
    Announce,
    LoadDisplay,
    Release,
    followed_by,
    json_announcer,
    load_display,
    print_line,
    text_announcer,
)
from ferryman_launcher.checks.check_apart import CheckedCluster, check_apart
from ferryman_launcher.checks.model_places import ModelPlaces
from ferryman_launcher.child import ChildEnded, ChildSpec, Launch, execute
from ferryman_launcher.fork_server import fork_server
from ferryman_launcher.host_plan import HostPlan, host_plans
from ferryman_launcher.model_files import stamps_of
from ferryman_launcher.process_plan import ProcessPlan, plan_processes, waiting
from ferryman_launcher.readiness import ReadyEvent, serving
from ferryman_launcher.recorded_settings import recorded_settings
from ferryman_launcher.restarts import RestartLimits
from ferryman_launcher.state_folder import ClusterFileWriter, RunningCluster, StateFolder
from ferryman_launcher.supervisor import Supervisor, with_environment

INSECURE = (
    "WARNING: --insecure: anybody who reaches a port of NATS, Redis or a service can read, order,"
    " forge and delete; never use it where strangers do"
)
EXIT_STOPPED = 0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
READY_SECONDS = 60.0
ECHO_SECONDS = 1.0


class _Stopped(Exception):
    """A signal asked for the end."""


def run_up(
    choices: UpOptions, places: ModelPlaces, *, as_json: bool, release: Release | None = None
) -> int:
    """Runs until it is told to stop; returns the exit status. A detached cluster has no terminal:
    it calls `release` when it was announced."""
    for note in (*choices.unheeded, *places.notes):
        _say(note)
    # Libraries have one OpenMP thread while they are imported; a worker sets its own number.
    imported = {**waiting(choices), **os.environ, "OMP_NUM_THREADS": "1"}
    with fork_server(imported, _say) as forks:
        launch = execute if forks is None else forks.launch
        checked = check_apart(choices, places, launch)
        if not checked.is_on_cpu:
            launch = execute  # a card cannot be forked
        announce = json_announcer(checked, choices)
        if not as_json:
            folder, is_detached = StateFolder(choices.state_dir), release is not None
            announce = text_announcer(folder, checked, choices, is_detached=is_detached)
        announced = announce if release is None else followed_by(announce, release)
        return _run_checked(choices, places, checked, launch, announced, as_json=as_json)


def _run_checked(
    choices: UpOptions,
    places: ModelPlaces,
    checked: CheckedCluster,
    launch: Launch,
    announce: Announce,
    *,
    as_json: bool,
) -> int:
    for note in checked.notes:
        _say(note)
    if choices.insecure:
        _say(INSECURE)
    for snapshot, model in places.missing():
        _say(f"downloading {model} to {snapshot}")
    places.fetch()
    choices = checked.completed(choices)
    folder = StateFolder(choices.state_dir)
    with folder.locked():
        for old in folder.logs.glob("*.log"):
            old.unlink()
        try:
            display = load_display(sys.stderr, _say, as_json=as_json)
            return asyncio.run(_Up(choices, folder, display, launch).run(announce))
        finally:
            folder.forget()
            sweep_stale_arenas()


class _Up:
    """One cluster, from its start to its end."""

    def __init__(
        self, choices: UpOptions, folder: StateFolder, display: LoadDisplay, launch: Launch
    ) -> None:
        self._choices, self._display = choices, display
        self._model_files = stamps_of(choices.engine.model.absolute())
        self._process_plan: ProcessPlan = plan_processes(choices, folder)
        self._supervisor = Supervisor(
            folder,
            os.environ,
            say=_say,
            limits=RestartLimits(standstill_seconds=choices.start_seconds),
            changed=self._on_change,
            on_load=display.show,
            launch=launch,
        )
        self._file = ClusterFileWriter(folder, self._cluster, self._supervisor.write_failures)
        self._stopping = asyncio.Event()
        self._signalled: dict[signal.Signals, float] = {}
        self._plans: tuple[HostPlan, ...] = ()

    async def run(self, announce: Announce) -> int:
        self._end_on_signals()
        status = EXIT_STOPPED
        try:
            renewing = self._process_plan.locks.watch_broker(self._renew_broker)
            async with alongside(self._raise_when_stopped(), renewing, self._file.run()):
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
        await self._supervisor.start(self._process_plan.servers)
        try:
            ready_events = await self._supervisor.start(self._process_plan.services)
        finally:
            self._display.close()
        self._pin_doors()
        async with asyncio.timeout(READY_SECONDS):
            for address in self._doors("http"):
                await serving(address, self._process_plan.locks.ca)
        caches = [
            ready_events[name]["address"]
            for name in sorted(ready_events)
            if name.startswith("hostcache")
        ]
        observer = self._process_plan.locks.access(ClusterRole.OBSERVER)
        self._plans = await host_plans(caches, self._choices.tiers.node_storage_bytes, observer)
        self._file.write_first()

    def _pin_doors(self) -> None:
        """Fixes the ports, so that a restarted router listens where its clients know it."""
        for job, event in self._routers():
            ports = {
                variable(f"{door}_port", "router"): event[door].rpartition(":")[2]
                for door in ("http", "grpc")
            }
            self._supervisor.pin(with_environment(job, ports))

    def _routers(self) -> Iterator[tuple[ChildSpec, ReadyEvent]]:
        """The routers that were ready at least once."""
        for job in self._process_plan.services:
            if job.role == "router" and job.name in self._supervisor.ready_events:
                yield job, self._supervisor.ready_events[job.name]

    def _doors(self, kind: str) -> list[str]:
        """host:port of each router's door of that kind: `http` or `grpc`."""
        return [event[kind] for _, event in self._routers()]

    def _cluster(self) -> RunningCluster:
        scheme = "https" if self._process_plan.locks.ca else "http"
        return RunningCluster(
            http=",".join(
                f"{scheme}://{self._reached(address)}" for address in self._doors("http")
            ),
            grpc=",".join(map(self._reached, self._doors("grpc"))),
            nats=self._process_plan.nats_url,
            redis=self._process_plan.redis_url,
            name=self._choices.cluster,
            model=self._choices.served_name,
            up_pid=os.getpid(),
            pids=self._supervisor.pids,
            ca=self._process_plan.locks.ca,
            down=self._supervisor.down,
            model_folder=str(self._choices.engine.model.absolute()),
            model_files=self._model_files,
            settings=recorded_settings(self._process_plan.services),
        )

    def _reached(self, address: str) -> str:
        """The address of a door; no certificate has the one that stands for all of a machine."""
        return address.replace("0.0.0.0:", "127.0.0.1:") if self._process_plan.locks.ca else address

    def _on_change(self) -> None:
        """Called when a process has ended, or is ready again: a router perhaps for the first
        time."""
        self._pin_doors()
        self._file.changed()

    def _renew_broker(self) -> None:
        """Has our own NATS read its certificate again; a broker of others is theirs to renew."""
        self._supervisor.send("nats", signal.SIGHUP)

    async def _raise_when_stopped(self) -> None:
        await self._stopping.wait()
        raise _Stopped

    def _end_on_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        """Asks for the end. The same signal again kills, unless it is an echo: `make` passes on the
        signal that the terminal sent to all."""
        now = asyncio.get_running_loop().time()
        if now - self._signalled.setdefault(number, now) > ECHO_SECONDS:
            self._supervisor.hurry()
        self._stopping.set()


def _status_of(group: BaseExceptionGroup[BaseException]) -> int:
    """The exit status for an error; logs a line unless a stop was asked for."""
    if group.subgroup(_Stopped) is not None:
        return EXIT_STOPPED
    if mistakes := _messages(group, ConfigError):
        _error(mistakes[0])
        return EXIT_MISCONFIGURED
    ended = _messages(group, ChildEnded)
    late = _messages(group, TimeoutError)
    if not ended and not late:
        raise group
    _error(ended[0] if ended else f"a router was not ready within {READY_SECONDS:g} s")
    return EXIT_FAILED


def _messages(
    group: BaseExceptionGroup[BaseException],
    kinds: type[BaseException] | tuple[type[BaseException], ...],
) -> list[str]:
    messages: list[str] = []
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            messages += _messages(error, kinds)
        elif isinstance(error, kinds):
            messages.append(str(error))
    return messages


def _say(line: str) -> None:
    print_line(f"ferryman: {line}", sys.stderr)


def _error(line: str) -> None:
    print_line(f"error: {line}", sys.stderr)
