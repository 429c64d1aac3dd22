"""Cuts names for debuggers off shared libraries: `python tools/strip_libraries.py FOLDER`.

Like `strip --strip-unneeded`, for images whose base has no binutils. A library is loaded by its
segments alone; symbol tables, debugging data and section headers that lie behind the last of them
are read by debuggers and linkers only. (ELF: System V ABI, chapters 4 and 5.)
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

WORTHWHILE_BYTES = 1 << 16
HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
SEGMENT = struct.Struct("<IIQQQQQQ")
LITTLE_64 = b"\x7fELF\x02\x01"
SHARED_OBJECT = 3


def loaded_bytes(path: Path) -> int:
    """How many leading bytes of a file its segments need; all of them if it is no library.

    Libraries are shared objects of 64 bits, little-endian.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(HEADER.size)
        if len(start) < HEADER.size or not start.startswith(LITTLE_64):
            return size
        fields = HEADER.unpack(start)
        kind, offset, count = fields[1], fields[5], fields[10]
        if kind != SHARED_OBJECT:
            return size
        file.seek(offset)
        segments = [SEGMENT.unpack(file.read(SEGMENT.size)) for _ in range(count)]
    ends: list[int] = [each[2] + each[5] for each in segments]
    return max(HEADER.size, int(offset + count * SEGMENT.size), *ends)


def cut(path: Path) -> int:
    """Cuts a library behind its last segment; returns how many bytes that saves."""
    size, wanted = path.stat().st_size, loaded_bytes(path)
    if size - wanted < WORTHWHILE_BYTES:
        return 0
    with path.open("r+b") as file:
        fields = list(HEADER.unpack(file.read(HEADER.size)))
        fields[6] = 0  # there are no section headers any more:
        fields[12] = fields[13] = 0  # neither a number of them nor one with their names
        file.seek(0)
        file.write(HEADER.pack(*fields))
        file.truncate(wanted)
    return size - wanted


def main(folder: str) -> None:
    paths = [path for path in Path(folder).rglob("*.so*") if not path.is_symlink()]
    saved = sum(cut(path) for path in paths if path.is_file())
    sys.stdout.write(f"{saved / 1e6:.0f} MB of symbols cut off\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
