"""`python -m ferryman_launcher.fork_server_process PARENT_PID MODULE`: services are forked from it.

It imports MODULE, and with it what services share (torch, numba, gRPC; three quarters of a worker's
start), once, and forks each service that it is asked for: those pages are then in memory once, too.
Standard input is a socket to the launcher, and this process ends when that closes.

A message of the launcher names a service's module and passes three files: the service's standard
output, its standard error, and a gate. The answer is the new process's id, or why there is none.
Through the gate the new process reads its environment, when the launcher knows its id. So this
process, and those forked from it later, never see another one's secrets; and a launcher that gave
up closes the gate, which ends the new process.

A fork copies the thread that forks and no other, so whatever holds threads or a device cannot be
forked: a service is refused if imports have made a thread or touched a card.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import runpy
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from ferryman.runtime.collection import importing
from ferryman.runtime.parent import end_with_parent

MESSAGE_BYTES = 4096
NUM_FILES = 3
_PR_SET_NAME = 15
_NAME_BYTES = 15


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """A service's module, and its files: descriptors of this process."""

    module: str
    output: int
    errors: int
    gate: int

    def close(self) -> None:
        for file in (self.output, self.errors, self.gate):
            os.close(file)


def main() -> None:
    launcher = socket.socket(fileno=os.dup(0))
    end_with_parent(int(sys.argv[1]))
    with importing():
        import_module(sys.argv[2])
    serve_forks(launcher, become_service)


def serve_forks(launcher: socket.socket, become: Callable[[ForkRequest], None]) -> None:
    """Answers requests until the launcher has gone. A new process returns as `become` does."""
    while (request := receive_request(launcher)) is not None:
        answer = _fork_for(request)
        if answer is None:
            launcher.close()
            become(request)
            return
        request.close()
        launcher.send(json.dumps(answer).encode())


def receive_request(launcher: socket.socket) -> ForkRequest | None:
    """The next request; None when the launcher has gone."""
    content, files, _, _ = socket.recv_fds(launcher, MESSAGE_BYTES, NUM_FILES)
    return ForkRequest(json.loads(content)["module"], *files) if content else None


def _fork_for(request: ForkRequest) -> Mapping[str, Any] | None:
    """The answer to the launcher; None in the new process."""
    if "." not in request.module:  # a service, which may be started again, and more than once
        with importing():
            import_module(f"{request.module}.service")
    if (reason := why_not_fork(sys.modules)) is not None:
        return {"refused": reason}
    pid = fork_apart()
    return None if pid is None else {"pid": pid}


def why_not_fork(modules: Mapping[str, ModuleType]) -> str | None:
    """The reason for which this process must not fork; None if it may."""
    if (num_threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"imports have started {num_threads - 1} threads"
    torch = modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA is initialised"
    return None


def fork_apart() -> int | None:
    """The id of a new process that is no child of this one; None in the new process.

    A process between the two ends at once, which gives the new one to the nearest ancestor that
    adopts (`ferryman.runtime.parent.adopting`): the launcher, which is then notified of its end,
    and which it outlives no more than a child does. Raises OSError.
    """
    reader, writer = os.pipe()
    between = os.fork()
    if not between:
        os.close(reader)
        _fork_again(writer)
        return None
    os.close(writer)
    with open(reader, "rb") as answer:
        content = answer.read()
    # The new process has its new parent only when the one between has ended.
    os.waitpid(between, 0)
    if not content:
        raise OSError("the process between could not fork")
    return int(content)


def _fork_again(writer: int) -> None:
    """Returns in the new process alone."""
    try:
        pid = os.fork()
    except OSError:
        os._exit(1)
    if pid:
        os.write(writer, str(pid).encode())
        os._exit(0)
    os.close(writer)


def become_service(request: ForkRequest) -> None:
    """Runs the service in a session and under a name of its own."""
    environment = environment_through(request.gate)
    if environment is not None:
        os.setsid()
        take_name(request.module)
        run_service(request, environment)


def environment_through(gate: int) -> Mapping[str, str] | None:
    """The variables of the new process; None if the launcher gave up."""
    with open(gate, "rb") as file:
        content = file.read()
    return json.loads(content) if content else None


def run_service(request: ForkRequest, environment: Mapping[str, str]) -> None:
    """Runs the service as `python -m MODULE` would, and returns or raises as it ends."""
    _take_files(request)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [request.module]
    runpy.run_module(request.module, run_name="__main__", alter_sys=True)


def _take_files(request: ForkRequest) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    for file, number in ((nothing, 0), (request.output, 1), (request.errors, 2)):
        os.dup2(file, number)
        os.close(file)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def take_name(module: str) -> None:
    """Sets the name that `ps -o comm` and `top` show."""
    name = module.replace("_", "-").encode()[:_NAME_BYTES]
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name, 0, 0, 0)


if __name__ == "__main__":
    main()
