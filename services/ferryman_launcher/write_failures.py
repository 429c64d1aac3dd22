"""Files that the launcher cannot write while a cluster runs: a full disk costs lines, not lives."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ferryman.security.key_file import FULL_DISK


class WriteFailures:
    """Says once that files cannot be written, however many they are, and once when all can be."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._failing: set[Path] = set()

    def failed(self, path: Path, error: OSError) -> None:
        """The file could not be written."""
        if not self._failing:
            self._say(
                f"WARNING: {path} cannot be written: {error.strerror}; the cluster goes on, and log"
                " lines are lost until there is room again"
            )
        self._failing.add(path)

    def written(self, path: Path) -> None:
        """The file was written."""
        if path in self._failing:
            self._failing.remove(path)
            if not self._failing:
                self._say(f"{path} can be written again, and so can all other files")


class ChildLog:
    """The log of one process, to which both the launcher and the process write.

    A line that cannot be written is dropped. Opening it raises OSError, except on a full disk: then
    the process writes to /dev/null.
    """

    def __init__(self, path: Path, failures: WriteFailures) -> None:
        self.path, self._failures = path, failures
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            failures.failed(path, error)
            self._file = Path(os.devnull).open("ab", buffering=0)
        self.start = self._file.tell()

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, content: bytes) -> None:
        """Writes all of it, or drops what the disk does not take."""
        if not content:
            return
        try:
            # A disk that is nearly full takes the first part only.
            while content:
                content = content[self._file.write(content) :]
        except OSError as error:
            self._failures.failed(self.path, error)
        else:
            self._failures.written(self.path)

    def close(self) -> None:
        self._file.close()

    def last_lines(self, number: int, num_bytes: int) -> list[str]:
        """The last lines of this life of the process; none if the log cannot be read."""
        try:
            with self.path.open("rb") as file:
                file.seek(max(self.start, file.seek(0, os.SEEK_END) - num_bytes))
                # Bounded: a device has no end.
                lines = file.read(num_bytes).decode(errors="replace").strip().splitlines()
        except OSError:
            return []
        return lines[-number:]
