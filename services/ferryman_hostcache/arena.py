"""The arena: one file in shared memory, allocated and prefaulted before anybody is served."""

from __future__ import annotations

import errno
import mmap
import os
from contextlib import suppress
from pathlib import Path

import xxhash

from ferryman.errors import ConfigError
from ferryman.wire.host_arena import OWNER_BYTE, is_locked, liveness_byte, try_lock

PAGE = mmap.PAGESIZE


class Arena:
    """The bytes of all host units. Made by `create`; `remove` takes its name away at the end."""

    def __init__(self, path: Path, fd: int, num_bytes: int) -> None:
        self.path, self.num_bytes = path, num_bytes
        self._fd = fd
        self._map = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._memory = memoryview(self._map)

    @classmethod
    def create(cls, path: Path, num_bytes: int) -> Arena:
        """Allocate every page now: too little room is a ConfigError here, not a SIGBUS later."""
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
        """Whether that worker maps the arena, as the kernel knows."""
        return is_locked(self._fd, liveness_byte(worker_index))

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """Room for, or the bytes of, one unit."""
        return self._memory[offset : offset + num_bytes]

    def digest(self, offset: int, num_bytes: int) -> bytes:
        """What the bytes hash to now; other threads run meanwhile."""
        return xxhash.xxh3_128_digest(self._memory[offset : offset + num_bytes])

    def remove(self) -> None:
        """Take the name away; the bytes live until the last worker has unmapped them."""
        with suppress(FileNotFoundError):
            self.path.unlink()
        with suppress(BufferError):
            self._memory.release()
            self._map.close()
        os.close(self._fd)


def _check_room(folder: Path, num_bytes: int) -> None:
    """A look ahead, so that a machine is not filled up before it turns out to be too small."""
    try:
        room = os.statvfs(folder)
    except OSError as error:
        raise ConfigError(f"the arena's folder {folder}: {error.strerror}") from error
    if room.f_bavail * room.f_frsize < num_bytes:
        raise ConfigError(_too_small(folder, num_bytes))


def _too_small(folder: Path, num_bytes: int) -> str:
    return (
        f"memory_bytes={num_bytes} do not fit {folder}; lower FERRYMAN_HOSTCACHE_MEMORY_BYTES or "
        f"enlarge it (docker: --shm-size)"
    )
