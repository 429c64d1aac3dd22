"""One child process: started, heard until it is ready, watched, and ended."""

from __future__ import annotations

import asyncio
import json
import re
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from ferryman.errors import ConfigError
from ferryman.runtime.life import EXIT_MISCONFIGURED

Said = Mapping[str, Any]
LAST_WORDS_BYTES = 4096
FLUSH_SECONDS = 1.0


class Ended(Exception):
    """A process ended that should not have; the message says how."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to start. `heard` is given each line of its output until one says that it is ready.

    `drain_rank` orders the end: the lowest ends first.
    """

    name: str
    argv: tuple[str, ...]
    drain_rank: int
    heard: Callable[[str], Said | None]
    environment: Mapping[str, str] = field(default_factory=dict)


def ready_event(line: str) -> Said | None:
    """The line with which a service says that it is ready."""
    if not line.startswith("{"):
        return None
    with suppress(ValueError):
        said = json.loads(line)
        if isinstance(said, dict) and said.get("event") == "ready":
            return said
    return None


def ready_words(pattern: re.Pattern[str]) -> Callable[[str], Said | None]:
    """For a server of others: a line that fits, from which nothing else is to be learned."""
    return lambda line: {} if pattern.search(line) else None


class Child(asyncio.SubprocessProtocol):
    """A running job. What it says goes to its log, from `log_start` on."""

    def __init__(self, job: Job, log: BinaryIO, log_path: Path) -> None:
        self.job, self._log, self._log_path = job, log, log_path
        self._log_start = log.tell()
        self._is_ready, self._exited, self._closed = (asyncio.Event() for _ in range(3))
        self._said: Said = {}
        self._unfinished = b""
        self._transport: asyncio.SubprocessTransport | None = None

    @property
    def pid(self) -> int:
        return self._process.get_pid()

    @property
    def is_running(self) -> bool:
        return not self._exited.is_set()

    async def ready(self, seconds: float) -> Said:
        """What it said when it was ready. Raises ConfigError or Ended with its last words."""
        try:
            async with asyncio.timeout(seconds):
                await self._is_ready.wait()
        except TimeoutError:
            raise Ended(f"{self.job.name} was not ready within {seconds:g} s") from None
        if self._exited.is_set():
            await self._raise_last_words()
        return self._said

    async def ended(self) -> str:
        """Waits for its end and says how it was."""
        await self._exited.wait()
        await self._heard_out()
        return _manner(self._process.get_returncode())

    async def stop(self, seconds: float) -> bool:
        """Terminates it, kills it when that takes too long; whether it ended well."""
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(seconds):
                await self._exited.wait()
        except TimeoutError:
            self.kill()
            await self._exited.wait()
        await self._heard_out()
        return self._process.get_returncode() == 0

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.SubprocessTransport, transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._log.write(data)
        self._log.flush()
        if self._is_ready.is_set():
            return
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        for line in lines:
            if (said := self.job.heard(line.decode(errors="replace"))) is not None:
                self._said = said
                self._is_ready.set()

    def process_exited(self) -> None:
        self._exited.set()
        self._is_ready.set()

    def connection_lost(self, error: Exception | None) -> None:
        """Called when the process has ended and its output too."""
        self._log.close()
        self._process.close()
        self._closed.set()

    @property
    def _process(self) -> asyncio.SubprocessTransport:
        assert self._transport is not None, "a child has its process before anybody sees it"
        return self._transport

    async def _heard_out(self) -> None:
        """Waits for the end of the output; a grandchild may hold it open, but not for ever."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_SECONDS):
                await self._closed.wait()

    async def _raise_last_words(self) -> None:
        await self._heard_out()
        name, status = self.job.name, self._process.get_returncode()
        words = last_words(self._log_path, self._log_start)
        if status == EXIT_MISCONFIGURED:
            raise ConfigError(f"{name}: {words.removeprefix('error: ')}")
        raise Ended(f"{name} {_manner(status)} before it was ready: {words}")


async def spawn(job: Job, log_path: Path, environment: Mapping[str, str]) -> Child:
    """Starts a job in a session of its own: a Ctrl-C in the terminal is not for it.

    Must be called on the main thread, or the child would end with the thread.
    """
    log = log_path.open("ab")
    loop = asyncio.get_running_loop()
    is_service = job.heard is ready_event
    _, child = await loop.subprocess_exec(
        lambda: Child(job, log, log_path),
        *job.argv,
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=log if is_service else STDOUT,
        env={**environment, **job.environment},
        start_new_session=True,
    )
    return child


def last_words(log_path: Path, start: int) -> str:
    """The last line of a log from `start` on, on which a service says why it does not run."""
    with log_path.open("rb") as log:
        end = log.seek(0, 2)
        log.seek(max(start, end - LAST_WORDS_BYTES))
        lines = log.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "(it said nothing)"


def _manner(status: int | None) -> str:
    if status is not None and status < 0:
        return f"was ended by signal {-status}"
    return f"exited with status {status}"
