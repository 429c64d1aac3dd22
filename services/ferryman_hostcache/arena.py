"""The arena: one file in shared memory, allocated before the service starts, and its attached
workers."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ferryman.errors import ConfigError, Stale
from ferryman.tiers.values import WorkerLife
from ferryman.wire.hostcache.arena import OWNER_BYTE, is_locked, liveness_byte, try_lock

PAGE = mmap.PAGESIZE

# The time from the answer to Attach until a worker must hold its lock.
LOCK_GRACE_SECONDS = 30.0


class Arena:
    """The bytes of all host units. `create` makes the file; `remove` unlinks it at the end."""

    def __init__(self, path: Path, fd: int, num_bytes: int) -> None:
        self.path, self.num_bytes = path, num_bytes
        self._fd = fd
        self._map = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._memory = memoryview(self._map)

    @classmethod
    def create(cls, path: Path, num_bytes: int) -> Arena:
        """Allocates every page now: too little room is a ConfigError here, not a SIGBUS later."""
        num_bytes -= num_bytes % PAGE
        _check_room(path.parent, num_bytes)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            assert try_lock(fd, OWNER_BYTE), "a file that is new is locked by nobody"
            os.posix_fallocate(fd, 0, num_bytes)
            return cls(path, fd, num_bytes)
        except BaseException as error:
            path.unlink()
            os.close(fd)
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise ConfigError(_too_small(path.parent, num_bytes)) from error
            raise

    def is_alive(self, worker_index: int) -> bool:
        """Whether that worker maps the arena, by its lock in the kernel."""
        return is_locked(self._fd, liveness_byte(worker_index))

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """The memory of one unit, to read or to write."""
        return self._memory[offset : offset + num_bytes]

    def digest(self, offset: int, num_bytes: int) -> bytes:
        """The digest of the bytes now. Releases the GIL."""
        return xxhash.xxh3_128_digest(self._memory[offset : offset + num_bytes])

    def remove(self) -> None:
        """Unlinks the file; its memory lives until the last worker has unmapped it."""
        with suppress(FileNotFoundError):
            self.path.unlink()
        with suppress(BufferError):
            self._memory.release()
            self._map.close()
        os.close(self._fd)


def _check_room(folder: Path, num_bytes: int) -> None:
    """Checks first, so that a machine that is too small is not filled up."""
    try:
        room = os.statvfs(folder)
    except OSError as error:
        raise ConfigError(f"the arena's folder {folder}: {error.strerror}") from error
    if room.f_bavail * room.f_frsize < num_bytes:
        raise ConfigError(_too_small(folder, num_bytes))


def _too_small(folder: Path, num_bytes: int) -> str:
    return (
        f"memory_bytes={num_bytes} do not fit {folder}; lower FERRYMAN_HOST_MEMORY or "
        f"enlarge it (docker: --shm-size)"
    )


@dataclass(slots=True)
class _Attached:
    life: WorkerLife
    index: int
    since: float
    has_locked: bool = False


class AttachedWorkers:
    """Attached lives by the index of their lock. `is_alive(index)` asks the kernel."""

    def __init__(self, is_alive: Callable[[int], bool]) -> None:
        self._is_alive = is_alive
        self._attached: list[_Attached] = []
        self._num_indices = 0

    def __len__(self) -> int:
        return len(self._attached)

    def attach(self, life: WorkerLife, now: float) -> int:
        """The index of the byte to lock. A life that attaches again gets a new one."""
        self._num_indices += 1
        self._attached.append(_Attached(life, self._num_indices, now))
        return self._num_indices

    def living(self, worker_id: str) -> WorkerLife:
        """The life that is calling; Stale unless it has attached and holds its lock."""
        mine = [each for each in self._attached if each.life.worker_id == worker_id]
        for each in reversed(mine):
            if self._is_alive(each.index):
                each.has_locked = True
                return each.life
        raise Stale(f"{worker_id} maps no arena here; attach again and lock the byte given")

    def sweep(self, now: float) -> tuple[WorkerLife, ...]:
        """Removes and returns the lives that have no mapping left."""
        over = [each for each in self._attached if self._is_over(each, now)]
        self._attached = [each for each in self._attached if each not in over]
        left = {each.life for each in self._attached}
        return tuple(dict.fromkeys(each.life for each in over if each.life not in left))

    def _is_over(self, attached: _Attached, now: float) -> bool:
        if self._is_alive(attached.index):
            attached.has_locked = True
            return False
        return attached.has_locked or now - attached.since > LOCK_GRACE_SECONDS
