"""The ledger of the launcher: child processes, ports, locks and open files of state folders.

Each is looked up where the kernel keeps it, so a give-back that is left out shows whichever part
of the launcher took it. Servers that a module starts once, and the tests' own children, were there
before a test, and are left alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ferryman.wire.handoff.host_network import listening_sockets

SETTLING_SECONDS = 20.0
PIPES = ("pipe:", "anon_inode:[pidfd")

Held = dict[str, list[str]]


@contextmanager
def launcher_holds_nothing(folder: Path) -> Iterator[None]:
    """The block leaves neither processes, nor ports, nor files open in or below a folder."""
    before = _held(folder)
    yield
    end = time.monotonic() + SETTLING_SECONDS
    while left := _more(_held(folder), before):
        assert time.monotonic() < end, f"not given back: {left}"
        time.sleep(0.02)


def _held(folder: Path) -> Held:
    files = dict(_open_files())
    return {
        "child processes": list(_children()),
        "locks": list(_locks(folder)),
        "files": sorted(name for name in files.values() if name.startswith(str(folder))),
        "pipes and processes' handles": sorted(
            f"{number} → {name}" for number, name in files.items() if name.startswith(PIPES)
        ),
        "ports": sorted(map(str, listening_sockets(os.getpid()))),
    }


def _more(now: Held, before: Held) -> Held:
    more = {what: [one for one in now[what] if one not in before[what]] for what in now}
    return {what: ones for what, ones in more.items() if ones}


def _children() -> Iterator[str]:
    """Each child of this process, ended ones that nobody has asked for too, and each process that
    was told that this one is its parent."""
    me = os.getpid()
    for entry in Path("/proc").iterdir():
        with suppress(OSError, IndexError):  # it has ended meanwhile
            if entry.name.isdecimal() and _is_child(entry, me):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ")[:80]
                yield f"{entry.name} {line.decode(errors='replace')}"


def _is_child(process: Path, me: int) -> bool:
    parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
    told = f"FERRYMAN_PARENT_PID={me}".encode()
    return int(parent) == me or told in (process / "environ").read_bytes().split(b"\0")


def _open_files() -> Iterator[tuple[str, str]]:
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            yield descriptor.name, os.readlink(descriptor)


def _locks(folder: Path) -> Iterator[str]:
    """The lock files below a folder that somebody has locked."""
    held = {
        line.split()[5].rpartition(":")[2] for line in _lines("/proc/locks") if "->" not in line
    }
    for path in folder.rglob("lock"):
        with suppress(OSError):
            if str(path.stat().st_ino) in held:
                yield str(path)


def _lines(path: str) -> list[str]:
    with suppress(OSError):
        return Path(path).read_text().splitlines()
    return [""]
