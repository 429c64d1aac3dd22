"""What a folder holds at start: whole extents by their headers; what is not whole goes.

Blocking; for threads.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ferryman.tiers.extents import HEAD_BYTES
from ferryman.tiers.storage_values import FoundExtent
from ferryman_hostcache.storage.extent import BadExtent, header_from_bytes, header_length
from ferryman_hostcache.storage.folder import EXTENT_SUFFIX, WRITING_SUFFIX, Folder

log = logging.getLogger(__name__)

MAX_GENERATION = 1 << 62
NOT_LOOKED_AT = ""  # the manifest digest of extents that time did not suffice for


@dataclass(frozen=True, slots=True)
class Scanned:
    """All extents of a folder, and how many files were removed, because they were never finished
    or because they are not what was written."""

    extents: tuple[FoundExtent, ...]
    num_unfinished: int
    num_corrupt: int


def scan(folder: Folder, seconds: float, clock: Callable[[], float]) -> Scanned:
    """Look at headers only, newest first, for so long; the rest counts as some other model's."""
    end, found, removed = clock() + seconds, [], Counter[str]()
    for path in sorted(folder.path.iterdir(), reverse=True):
        if path.suffix not in (EXTENT_SUFFIX, WRITING_SUFFIX):
            continue
        try:
            found.append(_unread(path) if clock() >= end else _read(path))
        except (BadExtent, OSError) as error:
            log.warning("removed %s: %s", path, error)
            _remove(path)
            removed[path.suffix] += 1
    return Scanned(tuple(found), removed[WRITING_SUFFIX], removed[EXTENT_SUFFIX])


def _read(path: Path) -> FoundExtent:
    generation = _generation(path)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        length = header_length(os.pread(fd, HEAD_BYTES, 0))
        header = os.pread(fd, length, 0)
        size = os.fstat(fd).st_size
    finally:
        os.close(fd)
    return header_from_bytes(header, generation=generation, file_bytes=size)


def _unread(path: Path) -> FoundExtent:
    generation, size = _generation(path), path.lstat().st_size
    return FoundExtent(generation, NOT_LOOKED_AT, (), (), 0, size)


def _generation(path: Path) -> int:
    if path.suffix == WRITING_SUFFIX or len(path.stem) != 16:
        raise BadExtent("never finished")
    try:
        generation = int(path.stem, 16)
    except ValueError:
        raise BadExtent("its name is no number") from None
    if not 0 < generation < MAX_GENERATION:
        raise BadExtent("its number is none that was ever given")
    return generation


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
