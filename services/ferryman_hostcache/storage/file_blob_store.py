"""Blobs as files of a local folder: one owner, written whole or not at all.

A blob is written to a temporary name, synced, read back, renamed, and the folder synced. So a file
with a blob's name is whole, even if the process was killed at any time.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import xxhash

from ferryman.errors import ConfigError
from ferryman.tiers.extents import ALIGNMENT, ExtentTable
from ferryman.tiers.storage_values import BlobPart, BlobRange, BlobStatistics
from ferryman_hostcache.storage.blob_store import AlignedBuffer
from ferryman_hostcache.storage.write_breaks import NO_BREAKS, FileBreaks, WriteBreaks

log = logging.getLogger(__name__)

PRIVATE = 0o700
LOCK_NAME = "owner.lock"
UNFINISHED_SUFFIX = ".writing"
PIECE_BYTES = 512 << 10
"""Bytes that are written without a break: 0.3 ms. Reading back takes a whole unit without one,
whose digest is that of all its bytes."""
BLOCK_BYTES = 512  # the unit of st_blocks, on every filesystem

Result = TypeVar("Result")

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class FileBlobStore:
    """A `BlobStore` in a folder."""

    def __init__(self, path: Path, breaks: WriteBreaks = NO_BREAKS) -> None:
        """Raises ConfigError when the folder cannot be used, or another process owns it."""
        self._path, self._breaks = path, breaks
        try:
            _make_private(path)
            self._lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"storage folder {path}: {error.strerror}") from error
        try:
            _own(path, self._lock)
            self._num_unfinished = self._remove_unfinished()
        except BaseException:
            os.close(self._lock)
            raise

    def _remove_unfinished(self) -> int:
        """Removes files that a former owner could not finish; returns how many."""
        left = [path for path in self._path.iterdir() if path.suffix == UNFINISHED_SUFFIX]
        for path in left:
            log.warning("removed %s: never finished", path)
            _unlink(path)
        return len(left)

    @property
    def term(self) -> int:
        return 0

    @property
    def place(self) -> str:
        return str(self._path)

    def extent_table(self) -> ExtentTable:
        return ExtentTable()

    def close(self) -> None:
        os.close(self._lock)

    # Writing.

    def put(self, name: str, num_bytes: int, parts: Sequence[BlobPart]) -> None:
        self._check_owned()
        breaks = self._breaks.of_one_file()
        final = self._path / name
        left = temporary = self._path / f"{name}{UNFINISHED_SUFFIX}"
        try:
            _write(temporary, num_bytes, parts, breaks)
            _past_the_page_cache(partial(_verify, temporary, parts, breaks))
            temporary.rename(final)
            left = final
            # A new name may be lost in a power cut until the folder is synced too.
            self._sync()
        except BaseException:
            _unlink(left)
            raise

    def _check_owned(self) -> None:
        """Raises OSError when the folder under this name is no longer the locked one."""
        if not os.path.samestat(os.stat(self._path / LOCK_NAME), os.fstat(self._lock)):
            raise OSError(errno.ESTALE, "the folder was replaced")

    def _sync(self) -> None:
        with _opened(self._path, os.O_RDONLY | os.O_DIRECTORY) as fd:
            os.fsync(fd)

    # Reading.

    def read(self, name: str, begin: int, into: memoryview) -> int:
        path = self._path / name
        if begin % ALIGNMENT or len(into) % ALIGNMENT:
            return _read(path, begin, into, 0)
        return _past_the_page_cache(partial(_read, path, begin, into))

    def scan(self) -> Mapping[str, int]:
        return {path.name: path.lstat().st_size for path in self._blobs()}

    def statistics(self) -> BlobStatistics:
        blocks = [path.lstat().st_blocks for path in self._blobs()]
        return BlobStatistics(len(blocks), sum(blocks) * BLOCK_BYTES, self._num_unfinished)

    def _blobs(self) -> Iterator[Path]:
        for path in self._path.iterdir():
            if path.name != LOCK_NAME and path.suffix != UNFINISHED_SUFFIX:
                yield path

    # Dropping.

    def punch(self, name: str, ranges: Sequence[BlobRange]) -> None:
        with suppress(FileNotFoundError), _opened(self._path / name, os.O_WRONLY) as fd:
            for begin, num_bytes in ranges:
                if begin % ALIGNMENT or num_bytes % ALIGNMENT:
                    _write_all(fd, memoryview(bytes(num_bytes)), begin)
                else:
                    _punch_hole(fd, begin, num_bytes)

    def delete(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)


def _make_private(path: Path) -> None:
    """Makes the folder private, because state is users' text in another form. Raises OSError, or
    ConfigError for a shared folder such as /tmp, which must not be closed to other users."""
    path.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & stat.S_IWOTH:
        raise ConfigError(f"storage folder {path}: others may write to it; give it one of its own")
    if mode != PRIVATE:
        try:
            path.chmod(PRIVATE)
        except PermissionError:
            log.warning("storage folder %s is another user's, with mode %o", path, mode)


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
        _punch_hole(lock, 0, ALIGNMENT)
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


def _unlink(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def _write(path: Path, num_bytes: int, parts: Sequence[BlobPart], breaks: FileBreaks) -> None:
    with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
        os.posix_fallocate(fd, 0, num_bytes)
        for part in parts:
            for begin in range(0, len(part.memory), PIECE_BYTES):
                piece = part.memory[begin : begin + PIECE_BYTES]
                with breaks.piece():
                    _write_all(fd, piece, part.offset + begin)
        with breaks.piece():
            os.fsync(fd)


def _write_all(fd: int, memory: memoryview, offset: int) -> None:
    done = 0
    while done < len(memory):
        done += os.pwrite(fd, memory[done:], offset + done)


def _past_the_page_cache(read: Callable[[int], Result]) -> Result:
    """Calls `read` with the flags to open a file for direct reads; without them if the filesystem
    does not support them or the memory is not aligned for them."""
    try:
        return read(os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return read(0)


def _verify(path: Path, parts: Sequence[BlobPart], breaks: FileBreaks, flags: int) -> None:
    """Raises EBADMSG unless every part reads back with its digest."""
    buffer = AlignedBuffer()
    with _opened(path, os.O_RDONLY | flags) as fd:
        for part in parts:
            with breaks.piece():
                content = buffer.read(partial(_fill, fd), part.offset, len(part.memory))
                digest = xxhash.xxh3_128_digest(content)
            if digest != part.digest:
                raise OSError(errno.EBADMSG, "what was written does not read the same")


def _read(path: Path, begin: int, into: memoryview, flags: int) -> int:
    with _opened(path, os.O_RDONLY | flags) as fd:
        return _fill(fd, begin, into)


def _fill(fd: int, begin: int, into: memoryview) -> int:
    done = 0
    while done < len(into):
        count = os.preadv(fd, [into[done:]], begin + done)
        done += count
        # Only the file's end makes a read this short, and reading cannot go on from there.
        if not count or done % ALIGNMENT:
            break
    return done


def _punch_hole(fd: int, offset: int, num_bytes: int) -> None:
    """Frees the blocks of this range. Raises OSError if the filesystem cannot."""
    if _libc.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, num_bytes):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
