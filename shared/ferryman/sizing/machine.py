"""Facts about this machine: free memory, the processor's number formats, accelerator cards.

Free memory is the least of three figures, because each of them can end a process: the kernel's
MemAvailable, and for every control group above this process its limit less what it uses. Pages of
files that nothing has read lately count as free: the kernel gives them back. Sources: proc(5),
and the kernel's documents of cgroup v1 (memory.txt) and v2 (cgroup-v2.rst).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ferryman_kernels.cpu.processor import has_bfloat16

_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as the largest page-aligned number


@dataclass(frozen=True, slots=True)
class Card:
    """An accelerator, by the number that torch gives it."""

    index: int
    name: str
    free_bytes: int
    has_bfloat16: bool


@dataclass(frozen=True, slots=True)
class MachineResources:
    """The resources that a cluster on this machine may share; `limited_by`: what limits RAM."""

    free_bytes: int
    limited_by: str
    has_bfloat16: bool
    cards: tuple[Card, ...] = ()


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Bytes that a process may still take, and the limit that it meets first."""

    num_bytes: int
    limited_by: str


def this_machine(root: Path = Path("/"), *, with_cards: bool = True) -> MachineResources:
    """This machine as it is now. Cards are looked for by torch, which takes a second to import."""
    memory = free_memory(root)
    return MachineResources(
        memory.num_bytes,
        memory.limited_by,
        has_bfloat16(_text(root / "proc/cpuinfo")),
        _cards() if with_cards else (),
    )


def free_memory(root: Path = Path("/")) -> FreeMemory:
    """The least of the machine's free memory and of what control groups leave to this process."""
    available = _meminfo(_text(root / "proc/meminfo"))
    limits = [FreeMemory(available, "MemAvailable"), *_group_limits(root)]
    return min(limits, key=lambda limit: limit.num_bytes)


def _meminfo(text: str) -> int:
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", text, re.MULTILINE)
    return int(match[1]) << 10 if match else _UNLIMITED


def _group_limits(root: Path) -> Iterator[FreeMemory]:
    """The memory left in every control group from this process up to the root, of both versions."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0" and not controllers:
            yield from _limits_above(root / "sys/fs/cgroup", path, _V2)
        elif "memory" in controllers.split(","):
            yield from _limits_above(root / "sys/fs/cgroup/memory", path, _V1)


@dataclass(frozen=True, slots=True)
class _Files:
    limit: str
    usage: str
    idle: str


_V2 = _Files("memory.max", "memory.current", "inactive_file")
_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _limits_above(mount: Path, path: str, files: _Files) -> Iterator[FreeMemory]:
    # A container often sees its own group as the root, under the path that the host has for it.
    inside = PurePosixPath(path.lstrip("/"))
    for group in (inside, *inside.parents):
        if ".." in group.parts:
            continue
        folder = mount / group
        limit, usage = _number(folder / files.limit), _number(folder / files.usage)
        if limit is None or usage is None or limit >= _UNLIMITED:
            continue
        idle = _statistics(_text(folder / "memory.stat")).get(files.idle, 0)
        free = min(limit, max(0, limit - usage + idle))
        yield FreeMemory(free, f"the limit of control group /{group}".removesuffix("."))


def _statistics(text: str) -> Mapping[str, int]:
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _number(path: Path) -> int | None:
    """None for "max", and for a file that is not there."""
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _cards() -> tuple[Card, ...]:
    import torch  # takes a second, and only some callers need cards

    if not torch.cuda.is_available():
        return ()
    return tuple(
        Card(
            index,
            torch.cuda.get_device_name(index),
            torch.cuda.mem_get_info(index)[0],
            torch.cuda.get_device_capability(index) >= (8, 0),
        )
        for index in range(torch.cuda.device_count())
    )
