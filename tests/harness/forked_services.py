"""Services forked from one process that has imported what they share, as those of `ferryman up`.

Importing is most of a service's start: three seconds of a worker's. A cluster of a test has six
services, and there are dozens of clusters, so each process of tests keeps one such server:
`python -m tests.harness.forked_services PARENT_PID`.

Services stay in the session of their test. Linux gives each session its share of the cores, and a
test that shared its own with others would be too late to disturb what it has begun.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import IO, Any, Protocol

from ferryman.runtime.collection import importing
from ferryman.runtime.parent import adopting, end_with_parent
from ferryman.settings.sources import without_settings
from ferryman_launcher.fork_server import ANSWER_SECONDS, MESSAGE_BYTES, SHARED, can_fork
from ferryman_launcher.fork_server_process import (
    ForkRequest,
    environment_through,
    run_service,
    serve_forks,
)

ROOT = Path(__file__).parents[2]


class ServiceProcess(Protocol):
    """The part of `subprocess.Popen` that tests of services use."""

    pid: int
    stdout: IO[str] | None
    returncode: int | Any

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int) -> None: ...

    def kill(self) -> None: ...


def start_service(module: str, environment: Mapping[str, str], stderr: IO[str]) -> ServiceProcess:
    """`python -m MODULE` with this environment; its output is a pipe."""
    # A process that has a card cannot be forked from one that was imported without it.
    if can_fork() and "FERRYMAN_TEST_DEVICE" not in os.environ:
        return _forked_service(module, environment, stderr.fileno())
    return subprocess.Popen(
        [sys.executable, "-m", module],
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


def _forked_service(module: str, environment: Mapping[str, str], stderr: int) -> ForkedService:
    reader, output = os.pipe()
    gate, opener = os.pipe()
    try:
        pid = fork_server("tests.harness.forked_services").fork(module, (output, stderr, gate))
    finally:
        os.close(output)
        os.close(gate)
    with os.fdopen(opener, "wb") as environment_file:
        environment_file.write(json.dumps(dict(environment)).encode())
    return ForkedService(pid, os.fdopen(reader))


@cache
def fork_server(module: str) -> ForkServerOfTests:
    """The server `python -m MODULE PARENT_PID` of this process, which starts with its first use."""
    server = ForkServerOfTests(module)
    atexit.register(server.close)
    return server


class ForkServerOfTests:
    """The test's end of a server. Must be made on the main thread, or it ends with the thread."""

    def __init__(self, module: str) -> None:
        self._turn = Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(ANSWER_SECONDS)
        with theirs:
            self._process = subprocess.Popen(
                (sys.executable, "-m", module, str(os.getpid())),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                cwd=ROOT,
                # Its imports would start threads, and then it may not fork.
                env={**without_settings(os.environ), "OMP_NUM_THREADS": "1"},
            )

    def fork(self, module: str, files: tuple[int, int, int]) -> int:
        """The id of a new process, a child of this one, that gets `files`."""
        message = json.dumps({"module": module}).encode()
        with self._turn, adopting():
            socket.send_fds(self._control, [message], files)
            answer = json.loads(self._control.recv(MESSAGE_BYTES))
        assert "pid" in answer, f"{module} was not forked: {answer}"
        pid: int = answer["pid"]
        return pid

    def close(self) -> None:
        """Ends the server; it has no state."""
        self._control.close()
        self._process.kill()
        self._process.wait()


class ForkedService:
    """A child that another process has forked, with what `ServiceProcess` promises.

    Until its end was seen its id stays taken, so a signal reaches it or nothing.
    """

    def __init__(self, pid: int, stdout: IO[str] | None) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | Any = None
        self._handle = os.pidfd_open(pid)
        weakref.finalize(self, os.close, self._handle)
        self._turn = Lock()

    def poll(self) -> int | None:
        with self._turn:
            if self.returncode is None and self._has_ended(0):
                self._reap()
        ended: int | None = self.returncode
        return ended

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if self.poll() is None and not self._has_ended(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        status = self.poll()
        assert status is not None, "its end was seen"
        return status

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _has_ended(self, timeout: float | None) -> bool:
        milliseconds = None if timeout is None else 1000 * timeout
        ends = select.poll()
        ends.register(self._handle, select.POLLIN)
        return bool(ends.poll(milliseconds))

    def _reap(self) -> None:
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)


def main() -> None:
    """The server: as `ferryman_launcher.fork_server_process`, for services of tests."""
    tests = socket.socket(fileno=os.dup(0))
    end_with_parent(int(sys.argv[1]))
    with importing():
        import_module(SHARED)
    serve_forks(tests, become_service_of_test)


def become_service_of_test(request: ForkRequest) -> None:
    """Runs the service in the session of its test."""
    environment = environment_through(request.gate)
    if environment is not None:
        run_service(request, environment)


if __name__ == "__main__":
    main()
