"""One child process: starts it, reads its output until it is ready, watches it, and ends it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, Protocol, cast

from ferryman.errors import ConfigError
from ferryman.runtime.life import EXIT_MISCONFIGURED
from ferryman.settings.sources import without_settings
from ferryman_launcher.readiness import (
    CompileReport,
    ReadyEvent,
    StartReport,
    ready_event,
    start_report,
)
from ferryman_launcher.write_failures import ChildLog

OnLoad = Callable[[StartReport], None]
LAST_OUTPUT_BYTES = 4096
LAST_LINES = 3
LINE_BYTES = 1 << 16
_GROUP_FRAME = re.compile(r"^ *(\+-[-+ .0-9]*$|\| )")
FLUSH_SECONDS = 1.0
COMPUTING_SECONDS = 1.0
"""The processor time that shows that a process without a report computes."""
COMPUTING_SPELLS = 5
"""The number of times that such a process gets as much time again."""


class ChildEnded(Exception):
    """A process ended that should not have; the message says how."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A process to start. `ready_event_of` gets each line of the output until it returns an event.

    `drain_rank` orders the end: the lowest ends first. The process inherits none of the caller's
    `FERRYMAN_*` variables, only those in `environment`, because only the router may have the API
    keys. A variable in `defaults` gives way to one of the caller's. Processes of one `role` can
    replace each other; without a role a process has no replacement. `absence` says what callers
    notice while no process of its role is ready.
    """

    name: str
    argv: tuple[str, ...]
    drain_rank: int
    ready_event_of: Callable[[str], ReadyEvent | None]
    environment: Mapping[str, str] = field(default_factory=dict)
    role: str = ""
    defaults: Mapping[str, str] = field(default_factory=dict)
    absence: str = "it is missing"

    def environment_from(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """All variables of the process."""
        return {**self.defaults, **without_settings(inherited), **self.environment}


class Child(asyncio.SubprocessProtocol):
    """A running process. Its output goes to its log."""

    def __init__(self, job: ChildSpec, log: ChildLog, on_load: OnLoad) -> None:
        self.job, self._log, self._on_load = job, log, on_load
        self._advanced, self._exited, self._closed = (asyncio.Event() for _ in range(3))
        self._report: StartReport | None = None
        self._ready_event: ReadyEvent | None = None
        self._unfinished = b""
        self._transport: asyncio.SubprocessTransport | None = None

    @property
    def pid(self) -> int:
        return self._process.get_pid()

    @property
    def is_running(self) -> bool:
        return not self._exited.is_set()

    async def ready(self, seconds: float) -> ReadyEvent:
        """The process's ready event, however long it takes while the process advances.

        Raises ConfigError, or ChildEnded with the last line of its output, or after `seconds`
        without progress.
        """
        spells = 0
        while self.is_running and self._ready_event is None:
            self._advanced.clear()
            used = _processor_seconds(self.pid)
            try:
                async with asyncio.timeout(seconds):
                    await self._advanced.wait()
            except TimeoutError:
                # One loop may take that long to compile on a busy machine.
                spells += 1
                computed = _processor_seconds(self.pid) - used
                if computed < COMPUTING_SECONDS or spells > COMPUTING_SPELLS:
                    waited = f"{self.job.name} {_standstill(self._report, seconds * spells)}"
                    raise ChildEnded(waited) from None
        if not self.is_running or self._ready_event is None:
            await self._raise_start_failure()
        return self._ready_event

    async def ended(self) -> str:
        """Waits for its end and describes it."""
        await self._exited.wait()
        await self._output_ended()
        return _manner(self._process.get_returncode())

    async def stop(self, seconds: float) -> bool:
        """Terminates it, kills it when that takes too long; returns whether it ended well."""
        self.send(signal.SIGTERM)
        try:
            async with asyncio.timeout(seconds):
                await self._exited.wait()
        except TimeoutError:
            self.kill()
            await self._exited.wait()
        await self._output_ended()
        return self._process.get_returncode() == 0

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal, if the process still runs."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def last_lines(self) -> tuple[str, ...]:
        """The end of its output, fit for a terminal."""
        lines = self._log.last_lines(LAST_LINES, LAST_OUTPUT_BYTES)
        return tuple(map(_printable, lines))

    # Callbacks of the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.SubprocessTransport, transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        kept = b""
        for line in lines:
            # Reports would hide the last lines of the log, and are of no use once it is ready. They
            # are heard after the exit too, which may be noticed before the output that preceded it.
            if self._ready_event is not None or not self._hear(line.decode(errors="replace")):
                kept += line + b"\n"
        if len(self._unfinished) > LINE_BYTES:
            kept, self._unfinished = kept + self._unfinished, b""
        self._log.write(kept)

    def process_exited(self) -> None:
        self._exited.set()
        self._advanced.set()

    def connection_lost(self, error: Exception | None) -> None:
        """Called when the process and its output have ended."""
        self._log.write(self._unfinished)
        self._log.close()
        self._process.close()
        self._closed.set()

    def _hear(self, line: str) -> bool:
        """Whether the line was a report."""
        if (event := self.job.ready_event_of(line)) is not None:
            self._ready_event = event
            self._advanced.set()
            return False
        report = start_report(line)
        # A report that repeats the last one is no progress.
        if report is not None and report != self._report:
            self._report = report
            self._advanced.set()
            self._on_load(report)
        return report is not None

    @property
    def _process(self) -> asyncio.SubprocessTransport:
        assert self._transport is not None, "a child has its process before anybody sees it"
        return self._transport

    async def _output_ended(self) -> None:
        """Waits for the end of the output; a grandchild may keep it open, so not for ever."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_SECONDS):
                await self._closed.wait()

    async def _raise_start_failure(self) -> NoReturn:
        await self._output_ended()
        name, status = self.job.name, self._process.get_returncode()
        words = _last_words(self.last_lines())
        if status == EXIT_MISCONFIGURED:
            raise ConfigError(f"{name}: {words.removeprefix('error: ')}")
        raise ChildEnded(f"{name} {_manner(status)} before it was ready: {words}")


def ignored(report: StartReport) -> None:
    """For a caller who shows no progress."""


class Launch(Protocol):
    """Starts a program for `protocol`, in a session of its own, so that a Ctrl-C in the terminal
    does not reach it. `errors` is a file's descriptor, or STDOUT. Raises OSError."""

    async def __call__(
        self,
        protocol: asyncio.SubprocessProtocol,
        argv: tuple[str, ...],
        environment: Mapping[str, str],
        errors: int,
    ) -> None: ...


async def execute(
    protocol: asyncio.SubprocessProtocol,
    argv: tuple[str, ...],
    environment: Mapping[str, str],
    errors: int,
) -> None:
    """The ordinary way."""
    await asyncio.get_running_loop().subprocess_exec(
        lambda: protocol,
        *argv,
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=errors,
        env=environment,
        start_new_session=True,
    )


async def spawn(
    job: ChildSpec,
    log: ChildLog,
    environment: Mapping[str, str],
    on_load: OnLoad = ignored,
    launch: Launch = execute,
) -> Child:
    """Starts a process, which owns `log` from now on. Raises OSError.

    Must be called on the main thread, or the child would end with the thread.
    """
    child = Child(job, log, on_load)
    # Servers of other projects have one stream for all their output.
    errors = log.fileno() if job.ready_event_of is ready_event else STDOUT
    try:
        await launch(child, job.argv, job.environment_from(environment), errors)
    except BaseException:
        log.close()
        raise
    return child


def _last_words(lines: Sequence[str]) -> str:
    """The last line that is more than the frame that Python draws around an ExceptionGroup: the
    message of the error within."""
    words = (_GROUP_FRAME.sub("", line) for line in reversed(lines))
    return next(filter(None, words), "(it said nothing)")


def _printable(line: str) -> str:
    """The line without characters that would steer a terminal."""
    return "".join(character if character.isprintable() else " " for character in line)


def _processor_seconds(pid: int) -> float:
    """The processor time of a process; 0 for one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    user, system = (int(ticks) for ticks in fields[11:13])
    return (user + system) / os.sysconf("SC_CLK_TCK")


def _standstill(report: StartReport | None, seconds: float) -> str:
    if report is None:
        return f"was not ready within {seconds:g} s"
    if isinstance(report, CompileReport):
        return f"was not ready, and has compiled {report.loop} for {seconds:g} s"
    return (
        f"was not ready, and stood still for {seconds:g} s after it had read {report.done_bytes} "
        f"of {report.total_bytes} bytes of {report.model} ({report.stage})"
    )


def _manner(status: int | None) -> str:
    if status is not None and status < 0:
        return f"was ended by signal {-status}"
    return f"exited with status {status}"
