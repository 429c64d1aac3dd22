"""`ferryman logs`: the end of the logs of a state folder, and what comes from now on."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from ferryman.errors import NotFound
from ferryman_launcher.state_folder import log_paths

LOOK_SECONDS = 0.1
READ_BYTES = 1 << 20

LineForm = Callable[[str, str], str]
"""Makes the line to print of a log's name and its line."""


def json_form(name: str, line: str) -> str:
    """An object, for programs."""
    return json.dumps({"log": name, "line": line})


def plain_form(name: str, line: str) -> str:
    """The line as it is, of a log that the caller named."""
    return line


def named_form(name: str, line: str) -> str:
    """The line behind the name of its log."""
    return f"{name} | {line}"


class LogTail:
    """The lines of one log. A file that was replaced, or cut, is read from its beginning."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self._path = name, path
        self._inode, self._position, self._rest = 0, 0, b""

    def last(self, number: int) -> list[str]:
        """The last lines; `new` goes on after them."""
        lines = list(self.new())
        return lines[-number:] if number else []

    def new(self) -> Iterator[str]:
        """The whole lines that were written since the last call."""
        try:
            with self._path.open("rb") as file:
                status = self._path.stat()
                if status.st_ino != self._inode or status.st_size < self._position:
                    self._inode, self._position, self._rest = status.st_ino, 0, b""
                file.seek(self._position)
                while content := file.read(READ_BYTES):
                    self._position += len(content)
                    *lines, self._rest = (self._rest + content).split(b"\n")
                    yield from (line.decode(errors="replace") for line in lines)
        except FileNotFoundError:
            return  # a cluster that starts has none yet


def run_logs(
    state_dir: Path, service: str, form: LineForm, *, number: int, follows: bool, out: TextIO
) -> int:
    """Prints the last lines of one log, or of all if `service` is empty; follows them until the
    caller interrupts. Raises NotFound for a name that has no log."""
    tails: dict[str, LogTail] = {}

    def print_lines(lines_of: Callable[[LogTail], list[str]]) -> None:
        for name, path in log_paths(state_dir).items():
            if service in ("", name):
                tail = tails.setdefault(name, LogTail(name, path))
                out.writelines(f"{form(name, line)}\n" for line in lines_of(tail))
        out.flush()

    try:
        print_lines(lambda tail: tail.last(number))
        if service and not tails:
            names = ", ".join(log_paths(state_dir)) or "none"
            raise NotFound(f"{state_dir} has no log of {service}; there are: {names}")
        while follows:
            time.sleep(LOOK_SECONDS)
            # A log that appears later is new from its first line on.
            print_lines(lambda tail: list(tail.new()))
    except BrokenPipeError:
        sys.stderr.close()  # the interpreter would complain about its stdout at exit
    return 0
