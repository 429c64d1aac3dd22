"""The host-cache's arena as a file in shared memory: its name, its locks, and its mapping.

Each process that maps the arena holds a write lock on its own byte of the file (open file
description locks, fcntl(2)). The kernel drops the lock with the process, even one that was killed,
and in any pid namespace: so no timeout is needed to know that a writer, or the arena's owner, is
gone.

    | arena bytes ... | proof |            | owner | worker 1 | worker 2 | ...
    0                 arena_bytes          LOCKS   LOCKS + 1

The host-cache writes a random proof behind the units. A process that shows it in a call can open
the file: a token alone says that somebody has a worker's credentials, on whatever machine.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import struct
from contextlib import suppress
from pathlib import Path

from ferryman.errors import Unavailable

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "ferryman-arena-"
PROOF_BYTES = 32
PROOF_KEY = "ferryman-arena"  # of a call's metadata, with the proof in hex
OWNER_BYTE = 1 << 60  # beyond the end of any arena; locks may lie there

_FLOCK = struct.Struct("hhqqi4x")  # struct flock on 64-bit Linux: type, whence, start, len, pid
_NAME = re.compile(re.escape(PREFIX) + r"[a-z0-9_-]+-[0-9a-f]{16}")


def arena_name(cluster: str, node_id: str, epoch: int) -> str:
    """The file's name: `ferryman-arena-<cluster>-<node>-<epoch in hex>`."""
    return f"{PREFIX}{cluster}-{node_id}-{epoch:016x}"


def liveness_byte(worker_index: int) -> int:
    """The byte that worker `worker_index` (from 1) locks."""
    return OWNER_BYTE + worker_index


def try_lock(fd: int, offset: int) -> bool:
    """Takes the write lock on one byte for this open file; False when another has it."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(offset))
    except (BlockingIOError, PermissionError):
        return False
    return True


def is_locked(fd: int, offset: int) -> bool:
    """Whether another open file has a lock on the byte."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _flock(offset))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def _flock(offset: int) -> bytes:
    return _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, offset, 1, 0)


def sweep_stale_arenas(prefix: str = PREFIX, folder: Path = SHARED_MEMORY) -> tuple[Path, ...]:
    """Removes arenas whose owner is gone, such as after a SIGKILL, and returns their paths.

    Only files with an arena's name that begins with `prefix` are considered.
    """
    candidates = [
        path for path in sorted(folder.glob(PREFIX + "*")) if path.name.startswith(prefix)
    ]
    return tuple(path for path in candidates if _NAME.fullmatch(path.name) and _removed_stale(path))


def _removed_stale(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # gone already, or another user's
        return False
    try:
        if is_locked(fd, OWNER_BYTE):
            return False
        path.unlink()
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


class MappedArena:
    """The arena in a worker's memory. The lock lives as long as the mapping; `proof` is what calls
    show.

    Only the bytes of units are touched: the host-cache takes memory for these alone.
    """

    def __init__(self, path: str, num_bytes: int, lock_offset: int) -> None:
        """Raises Unavailable when the file is gone, too small, or the byte is locked."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise Unavailable(f"the arena {path} cannot be opened: {error.strerror}") from error
        try:
            proof = os.pread(fd, PROOF_BYTES, num_bytes)
            if len(proof) < PROOF_BYTES:
                raise Unavailable(f"the arena {path} is smaller than {num_bytes} bytes and a proof")
            if not try_lock(fd, lock_offset):
                raise Unavailable(f"byte {lock_offset} of {path} is locked by another")
            self._map = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED)
        except OSError as error:
            raise Unavailable(f"the arena {path} cannot be mapped: {error.strerror}") from error
        finally:
            os.close(fd)  # the map keeps a duplicate, and with it the lock
        self.path, self.proof = path, ((PROOF_KEY, proof.hex()),)
        self.memory = memoryview(self._map)

    def close(self) -> None:
        """Unmaps the arena, unless a view of it still exists; then the last view unmaps it."""
        with suppress(BufferError):
            self.memory.release()
            self._map.close()
