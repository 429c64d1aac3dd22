"""`ferryman up --detach`: the cluster in a session of its own, from which this command returns when
it is ready.

The new process writes to `up.log` of the state folder. Until the cluster is ready this command
copies that file to stderr, and the announcement to stdout.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from ferryman_launcher.folder_lock import holder_of
from ferryman_launcher.state_folder import StateFolder

LOOK_SECONDS = 0.1
PIPE_BYTES = 1 << 16
STDIN, STDOUT, STDERR = 0, 1, 2

Release = Callable[[], None]


def run_detached(folder: StateFolder, start: Callable[[Release], int]) -> int:
    """Runs `start` in a process of its own session until that calls `release`, or ends; returns its
    exit status, 0 for one that goes on.

    Must be called before any thread exists: a fork has the calling thread alone.
    """
    log = folder.up_log
    if not holder_of(folder.path):
        log.unlink(missing_ok=True)
    with log.open("ab", buffering=0) as errors:
        begin = errors.tell()
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            _become(reader, writer, errors.fileno())
            os._exit(_status_of(start, errors.fileno()))
    os.close(writer)
    return _Starting(pid, reader, log, begin).wait()


def _become(reader: int, writer: int, errors: int) -> None:
    """In the new process: no terminal, the announcement to the pipe, the rest to the log."""
    os.setsid()
    os.close(reader)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), STDIN)
    os.dup2(writer, STDOUT)
    os.close(writer)
    os.dup2(errors, STDERR)


def _status_of(start: Callable[[Release], int], errors: int) -> int:
    from ferryman_cli.app import reported

    def release() -> None:
        sys.stdout.flush()
        os.dup2(errors, STDOUT)  # the reader of the pipe sees its end

    status = reported(lambda: start(release))
    sys.stdout.flush()
    sys.stderr.flush()
    return status


class _Starting:
    """The process that starts, for the one that was called."""

    def __init__(self, pid: int, reader: int, log: Path, begin: int) -> None:
        self._pid, self._reader, self._log, self._position = pid, reader, log, begin
        self._is_announced = False

    def wait(self) -> int:
        """Waits until the announcement has ended, or the process."""
        try:
            self._copy()
        except KeyboardInterrupt:
            os.kill(self._pid, signal.SIGINT)
            self._copy()
        finally:
            os.close(self._reader)
        if self._is_announced:
            return 0
        _, status = os.waitpid(self._pid, 0)
        self._show_log()
        return os.waitstatus_to_exitcode(status)

    def _copy(self) -> None:
        while True:
            readable, _, _ = select.select([self._reader], [], [], LOOK_SECONDS)
            self._show_log()
            if not readable:
                continue
            content = os.read(self._reader, PIPE_BYTES)
            if not content:
                return
            self._is_announced = True
            sys.stdout.write(content.decode(errors="replace"))
            sys.stdout.flush()

    def _show_log(self) -> None:
        with self._log.open("rb") as file:
            file.seek(self._position)
            content = file.read()
        self._position += len(content)
        sys.stderr.write(content.decode(errors="replace"))
        sys.stderr.flush()
