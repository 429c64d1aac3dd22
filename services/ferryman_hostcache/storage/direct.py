"""Reads past the page cache, into memory that is aligned as the disk wants it; and holes."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

from ferryman.tiers.extents import ALIGNMENT, aligned

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class AlignedBuffer:
    """Page-aligned memory that grows to what is asked of it. For one thread."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, ALIGNMENT)

    def first(self, num_bytes: int) -> memoryview:
        """Room for so many bytes; what was here before is gone."""
        if len(self._map) < num_bytes:
            self._map = mmap.mmap(-1, aligned(num_bytes))
        return memoryview(self._map)[:num_bytes]


def open_direct(path: Path) -> int:
    """A file to be read; without the page cache where the filesystem has that. OSError."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags)


def read_range(fd: int, offset: int, num_bytes: int, buffer: AlignedBuffer) -> memoryview:
    """Bytes [offset, offset + num_bytes), fewer at the file's end; valid until the next read."""
    start = offset - offset % ALIGNMENT
    room = buffer.first(aligned(offset + num_bytes - start))
    done = 0
    while done < len(room):
        count = os.preadv(fd, [room[done:]], start + done)
        done += count
        if not count or done % ALIGNMENT:
            break
    return room[:done][offset - start :][:num_bytes]


def punch_hole(fd: int, offset: int, num_bytes: int) -> None:
    """Give the blocks of this range back to the filesystem. OSError where it cannot."""
    if _libc.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, num_bytes):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
