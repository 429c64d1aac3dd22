"""The folder of extents: one owner, written whole or not at all. Blocking; for threads.

An extent is written to a temporary name, synced, read back, renamed, and the folder synced. So what
bears an extent's name is whole, whenever the process was killed.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

from ferryman.errors import ConfigError
from ferryman.tiers.extents import ALIGNMENT, DiskWork, RemoveExtent, aligned
from ferryman.tiers.storage_values import ExtentPlan
from ferryman_hostcache.storage.direct import AlignedBuffer, open_direct, punch_hole, read_range
from ferryman_hostcache.storage.extent import DEAD_FLAG, flag_offset, header_to_bytes

LOCK_NAME = "owner.lock"
EXTENT_SUFFIX, WRITING_SUFFIX = ".extent", ".writing"


class Folder:
    """A folder that this process owns until `close`."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError when the folder cannot be used, or another process owns it."""
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"storage folder {path}: {error.strerror}") from error
        try:
            _own(path, self._lock)
        except BaseException:
            os.close(self._lock)
            raise

    def close(self) -> None:
        os.close(self._lock)

    def extent_path(self, generation: int) -> Path:
        return self.path / f"{generation:016x}{EXTENT_SUFFIX}"

    def check_owned(self) -> None:
        """OSError when the folder under this name is no longer the one that is locked."""
        if not os.path.samestat(os.stat(self.path / LOCK_NAME), os.fstat(self._lock)):
            raise OSError(errno.ESTALE, "the folder was replaced")

    # Writing.

    def write(self, plan: ExtentPlan, manifest_digest: str, memories: Sequence[memoryview]) -> None:
        """The extent is there, with just these bytes, when this returns; OSError otherwise."""
        self.check_owned()
        final = self.extent_path(plan.generation)
        temporary = final.with_suffix(WRITING_SUFFIX)
        try:
            self._write_to(temporary, plan, manifest_digest, memories)
            _verify(temporary, plan)
            temporary.rename(final)
            self._sync()
        except BaseException:
            for path in (temporary, final):
                with suppress(OSError):
                    path.unlink()
            raise

    def _write_to(
        self,
        path: Path,
        plan: ExtentPlan,
        manifest_digest: str,
        memories: Sequence[memoryview],
    ) -> None:
        with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
            os.posix_fallocate(fd, 0, plan.file_bytes)
            _write_all(fd, memoryview(header_to_bytes(plan, manifest_digest)), 0)
            for unit, memory in zip(plan.units, memories, strict=True):
                _write_all(fd, memory, unit.offset)
            os.fsync(fd)

    def _sync(self) -> None:
        with _opened(self.path, os.O_RDONLY | os.O_DIRECTORY) as fd:
            os.fsync(fd)

    # Giving up.

    def do(self, work: DiskWork) -> None:
        """Drop a unit or remove an extent; what is gone already is well. OSError."""
        with suppress(FileNotFoundError):
            if isinstance(work, RemoveExtent):
                self.extent_path(work.generation).unlink()
                return
            with _opened(self.extent_path(work.generation), os.O_WRONLY) as fd:
                _write_all(fd, memoryview(DEAD_FLAG), flag_offset(work.index))
                punch_hole(fd, work.offset, aligned(work.num_bytes))


def _own(path: Path, lock: int) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            f"storage folder {path} belongs to another host-cache that runs; give this one a "
            "folder of its own"
        ) from error
    try:
        os.ftruncate(lock, 2 * ALIGNMENT)
        punch_hole(lock, 0, ALIGNMENT)
    except OSError as error:
        raise ConfigError(
            f"storage folder {path}: {error.strerror}; it takes a filesystem whose files can have "
            "holes, such as ext4, xfs, btrfs or tmpfs"
        ) from error


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def _write_all(fd: int, memory: memoryview, offset: int) -> None:
    done = 0
    while done < len(memory):
        done += os.pwrite(fd, memory[done:], offset + done)


def _verify(path: Path, plan: ExtentPlan) -> None:
    """What is on disk is what was to be written. EBADMSG: the disk, or the memory it came from."""
    buffer, fd = AlignedBuffer(), open_direct(path)
    try:
        for unit in plan.units:
            found = read_range(fd, unit.offset, unit.num_bytes, buffer)
            if xxhash.xxh3_128_digest(found) != unit.digest:
                raise OSError(errno.EBADMSG, "what was written does not read the same")
    finally:
        os.close(fd)
