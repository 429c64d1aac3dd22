"""The faults themselves, each seen to happen, and to be over."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.processes import process_state
from tools.campaigns.faults.isolation import ControlGroups
from tools.campaigns.faults.processes import Target, ports, sockets

BACK_SECONDS = 180.0
LOOK_SECONDS = 0.02


class NoEffect(Exception):
    """A fault that was injected did not happen, or a process did not come back."""


async def await_return(
    target: Target, groups: ControlGroups, name: str, pid: int, num_returns: int
) -> None:
    """Until `up` has started the process of that id again, and the new id is known."""
    try:
        async with asyncio.timeout(BACK_SECONDS):
            while target.num_returns(name) == num_returns or not (
                target.pids[name] != pid or target.adopt(name)
            ):
                await asyncio.sleep(LOOK_SECONDS)
    except TimeoutError:
        raise NoEffect(f"{name} did not come back in {BACK_SECONDS} s") from None
    groups.join(name, target.pids[name])


async def await_stopped(name: str, pid: int, seconds: float) -> None:
    """A process that has had its SIGSTOP is stopped for so long, and then goes on."""
    try:
        async with asyncio.timeout(5):
            while process_state(pid) != "T":
                await asyncio.sleep(LOOK_SECONDS)
        await asyncio.sleep(seconds)
        if process_state(pid) != "T":
            raise NoEffect(f"{name} ({pid}) ran on though it was stopped")
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


class Partitions:
    """Rules of the packet filter that drop all between two processes, both ways."""

    def __init__(self, groups: ControlGroups) -> None:
        self._groups = groups
        self._number = 0

    def cut(self, one: str, one_pid: int, other: str, other_pid: int) -> str:
        """Drops from now on; returns the name of the chain."""
        self._number += 1
        chain = f"cut-{self._number}"
        ends = (self._groups.path(one), one_pid), (self._groups.path(other), other_pid)
        _restore([f":{chain} - [0:0]", *_rules(chain, *ends), f"-I OUTPUT -j {chain}"])
        return chain

    def heal(self, chain: str) -> int:
        """The number of packets that were dropped."""
        listed = _run(["iptables", "-w", "-nvxL", chain]).splitlines()[2:]
        _restore([f"-D OUTPUT -j {chain}", f"-F {chain}", f"-X {chain}"])
        return sum(int(line.split()[0]) for line in listed)


def _rules(chain: str, one: tuple[str, int], other: tuple[str, int]) -> Iterator[str]:
    """New connections are known by the sender's group, those that are open by their two ports."""
    for (group, pid), (_, to) in ((one, other), (other, one)):
        here, there = sockets(pid), sockets(to)
        for port in ports(to):
            yield f"-A {chain} -p tcp --dport {port} -m cgroup --path {group} -j DROP"
        pairs = {(s.local, s.remote) for s in here if not s.is_listening}
        mirrored = {(s.remote, s.local) for s in there if not s.is_listening}
        for local, remote in sorted(pairs & mirrored):
            yield f"-A {chain} -p tcp --sport {local} --dport {remote} -j DROP"


def _restore(lines: Sequence[str]) -> None:
    text = "\n".join(("*filter", *lines, "COMMIT", ""))
    subprocess.run(["iptables-restore", "-w", "--noflush"], input=text, text=True, check=True)


def _run(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """The file system of a folder takes nothing within the block."""
    filler = folder / "filler"
    descriptor = os.open(filler, os.O_CREAT | os.O_WRONLY)
    try:
        _fill(descriptor)
        if _takes_a_page(folder):
            raise NoEffect(f"{folder} takes more though it was filled")
        yield
    finally:
        os.close(descriptor)
        filler.unlink()


def keep_full(folder: Path) -> None:
    """Fills what its users have freed since."""
    with suppress(FileNotFoundError):
        descriptor = os.open(folder / "filler", os.O_WRONLY | os.O_APPEND)
        try:
            _fill(descriptor)
        finally:
            os.close(descriptor)


def _fill(descriptor: int) -> None:
    for size in (1 << 24, 1 << 20, 1 << 12):
        with suppress(OSError):
            while True:
                os.posix_fallocate(descriptor, os.fstat(descriptor).st_size, size)


def _takes_a_page(folder: Path) -> bool:
    probe = folder / "probe"
    try:
        probe.write_bytes(b"\0" * 4096)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True


def now() -> float:
    return time.monotonic()
