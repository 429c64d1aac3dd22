"""The processes of a running `ferryman up`: ids, ports, and what it says of deaths and returns."""

from __future__ import annotations

import os
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ferryman.errors import ConfigError
from ferryman_launcher.state_folder import running_cluster

ROLES = {
    "router": ("router-1", "router-2"),
    "prefill": ("prefill-1", "prefill-2"),
    "decode": ("decode-1", "decode-2"),
}
WORKERS = (*ROLES["prefill"], *ROLES["decode"])
NAMES = (*ROLES["router"], *WORKERS, "hostcache", "nats", "redis")
# As the kernel shows them: 15 characters.
_COMMANDS = {"nats": "nats-server", "redis": "valkey-server"}
_BACK = re.compile(r"ferryman: (\S+) is back after")
_ENDED = re.compile(
    r"ferryman: (?:WARNING: )?(\S+) [^\n]*?(?:; starting it again in|, death \d+ in a row)"
)
_LISTENS = "0A"


def role_of(name: str) -> str:
    """`decode` for `decode-1`."""
    return name.partition("-")[0]


@dataclass(slots=True)
class LauncherLog:
    """The launcher's own words, read once each: how often each process was back, or ended."""

    path: Path
    returns: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    _offset: int = 0
    _rest: str = ""

    def read(self) -> None:
        """Takes in all whole lines since the last time."""
        with self.path.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        self._offset += len(content)
        text = self._rest + content.decode(errors="replace")
        lines, _, self._rest = text.rpartition("\n")
        self.returns.update(_BACK.findall(lines))
        self.ends.update(_ENDED.findall(lines))


class Target:
    """A running `ferryman up`: its state folder, its log, and the latest process of each name.

    The ids are read from the kernel, because a cluster on a full disk cannot write them down.
    """

    def __init__(self, state_dir: Path, log: Path) -> None:
        self.state_dir, self.log = state_dir, LauncherLog(log)
        cluster = running_cluster(state_dir)
        self.up_pid, self.pids = cluster.up_pid, dict(cluster.pids)

    def num_returns(self, name: str) -> int:
        self.log.read()
        return self.log.returns[name]

    def adopt(self, name: str) -> bool:
        """Whether the process that came back for `name` is known now: the one child of the launcher
        with that role's command that no other name has."""
        before = self.pids[name]
        others = {pid for other, pid in self.pids.items() if other != name}
        command = _COMMANDS.get(name, f"ferryman-{role_of(name)}")[:15]
        fresh = [pid for pid in _children(self.up_pid, command) if pid not in others | {before}]
        if len(fresh) > 1:  # two of one role came back at once, so the launcher has to say
            with suppress(ConfigError):
                fresh = [pid for pid in fresh if pid == running_cluster(self.state_dir).pids[name]]
        if len(fresh) == 1:
            self.pids[name] = fresh[0]
        return len(fresh) == 1

    def name_at(self, port: int) -> str | None:
        """Of the process that listens on a port."""
        return next((name for name, pid in self.pids.items() if port in ports(pid)), None)


def _children(parent: int, command: str) -> list[int]:
    children = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            rest = (folder / "stat").read_text().rpartition(") ")[2].split()
            is_child = int(rest[1]) == parent and rest[0] != "Z"
            if is_child and (folder / "comm").read_text().strip() == command:
                children.append(int(folder.name))
    return children


@dataclass(frozen=True, slots=True)
class TcpSocket:
    """A line of /proc/net/tcp."""

    local: int
    remote: int
    is_listening: bool
    inode: int


def sockets(pid: int) -> list[TcpSocket]:
    """The TCP sockets of a process, in this network."""
    inodes = set()
    with suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                link = os.readlink(entry.path)
                if link.startswith("socket:["):
                    inodes.add(int(link[8:-1]))
    lines = []
    for table in ("tcp", "tcp6"):
        lines += Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    return [one for line in lines if (one := parsed_socket(line)).inode in inodes]


def parsed_socket(line: str) -> TcpSocket:
    """Of a line of the kernel's table: addresses are hexadecimal, and end with the port."""
    words = line.split()
    local, remote = (int(word.rpartition(":")[2], 16) for word in words[1:3])
    return TcpSocket(local, remote, words[3] == _LISTENS, int(words[9]))


def ports(pid: int) -> set[int]:
    """On which a process listens."""
    return {one.local for one in sockets(pid) if one.is_listening}
