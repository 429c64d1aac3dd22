"""Services forked from one process that has imported what they share.

They start sooner and share its memory, and are processes like others all the same: children of this
one, with a session, a log and an environment of their own, killed and started again alone. If that
process cannot be started, or may not fork, a service is started in the ordinary way.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

from ferryman.runtime.parent import adopting
from ferryman.settings.sources import without_settings
from ferryman_launcher.child import execute
from ferryman_launcher.forked_process import ForkedProcess

MODULE = "ferryman_launcher.fork_server_process"
SHARED = "ferryman.worker.worker_app"  # imports nearly all that services import
ANSWER_SECONDS = 120.0  # imports from a cold disk
MESSAGE_BYTES = 4096


class ForkRefused(Exception):
    """There is no forked process; the message says why."""


class _ForkPipes:
    """Two pipes: a new process's output, and its gate. The new process has copies of the ends
    `output` and `gate`."""

    def __init__(self) -> None:
        self._reader, self.output = os.pipe()
        self.gate, self._opener = os.pipe()
        self._open = {self._reader, self.output, self.gate, self._opener}

    @classmethod
    @contextmanager
    def opened(cls) -> Iterator[_ForkPipes]:
        """Two pipes for the length of a block. A gate that was not opened is closed for good."""
        files = cls()
        try:
            yield files
        finally:
            for file in files._open:
                os.close(file)

    def reader(self) -> BinaryIO:
        """The output, for the caller to close."""
        self._open.remove(self._reader)
        return os.fdopen(self._reader, "rb", buffering=0)

    def open_gate(self, environment: Mapping[str, str]) -> None:
        """Lets the process run with these variables."""
        self._open.remove(self._opener)
        # A process that was killed meanwhile has started, and its end is reported as any other.
        with suppress(BrokenPipeError), os.fdopen(self._opener, "wb") as opener:
            opener.write(json.dumps(dict(environment)).encode())


class ForkServer:
    """The launcher's end. It forks services one after the other."""

    def __init__(
        self, process: subprocess.Popen[bytes], control: socket.socket, say: Callable[[str], None]
    ) -> None:
        self._process, self._control, self._say = process, control, say
        self._turn = asyncio.Lock()
        self._refusal = ""

    @property
    def pid(self) -> int:
        return self._process.pid

    async def launch(
        self,
        protocol: asyncio.SubprocessProtocol,
        argv: tuple[str, ...],
        environment: Mapping[str, str],
        errors: int,
    ) -> None:
        """Forks our own programs; executes others, and all of them if it cannot fork."""
        module = own_module(argv)
        if module is not None:
            async with self._turn:
                if await self._has_forked(protocol, module, environment, errors):
                    return
        await execute(protocol, argv, environment, errors)

    async def _has_forked(
        self,
        protocol: asyncio.SubprocessProtocol,
        module: str,
        environment: Mapping[str, str],
        errors: int,
    ) -> bool:
        if self._refusal:
            return False
        try:
            with _ForkPipes.opened() as files:
                with adopting():
                    pid = await self._asked(module, (files.output, errors, files.gate))
                forked = ForkedProcess(pid, protocol)
                await forked.read(files.reader())
                files.open_gate(environment)
        except asyncio.CancelledError:
            self.refuse("a request was given up")  # its answer would be taken for the next one's
            raise
        except (ForkRefused, OSError) as error:
            self._say(f"services start more slowly from now on, each with imports: {error}")
            self.refuse(str(error))
            return False
        return True

    def refuse(self, reason: str) -> None:
        """Ends the process: services forked from it go on, others are executed."""
        self._refusal = self._refusal or reason
        self._control.close()
        self._process.kill()
        self._process.wait()

    async def _asked(self, module: str, files: tuple[int, int, int]) -> int:
        message = json.dumps({"module": module}).encode()
        try:
            socket.send_fds(self._control, [message], files)
            async with asyncio.timeout(ANSWER_SECONDS):
                loop = asyncio.get_running_loop()
                content = await loop.sock_recv(self._control, MESSAGE_BYTES)
        except ConnectionError:
            raise ForkRefused("it has ended") from None
        except TimeoutError:
            raise ForkRefused(f"it did not answer within {ANSWER_SECONDS:g} s") from None
        if not content:
            raise ForkRefused("it has ended")
        answer: Mapping[str, Any] = json.loads(content)
        if "refused" in answer:
            raise ForkRefused(answer["refused"])
        return int(answer["pid"])


def own_module(argv: tuple[str, ...]) -> str | None:
    """The module of `python -m ferryman_…`; None for another program."""
    match argv:
        case (sys.executable, "-m", module) if module.startswith("ferryman_"):
            return module
    return None


def can_fork() -> bool:
    """Whether this system can do it: Linux, 5.3 or later."""
    if sys.platform != "linux":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


@contextmanager
def fork_server(
    environment: Mapping[str, str], say: Callable[[str], None], shared: str = SHARED
) -> Iterator[ForkServer | None]:
    """A server for the length of a block, which begins at once to import the module `shared`; None
    if the system has none.

    Libraries read their part of `environment` when they are imported, so it must be what services
    will have; settings are left out. Must be called on the main thread, or it ends with the thread.
    """
    if not can_fork():
        yield None
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        ours.setblocking(False)
        with theirs:
            process = subprocess.Popen(
                (sys.executable, "-m", MODULE, str(os.getpid()), shared),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=without_settings(environment),
                start_new_session=True,
            )
        server = ForkServer(process, ours, say)
        try:
            yield server
        finally:
            server.refuse("the cluster ends")
