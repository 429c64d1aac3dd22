"""A process that another one has forked and this one has adopted, as asyncio sees its children."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from typing import BinaryIO

OUTPUT = 1


class ForkedProcess(asyncio.SubprocessTransport):
    """Reports a process's output and end to `protocol`, as the loop's own transport does.

    The process must be a child of this one by now. Until its end is seen its id stays taken, so a
    signal reaches it or nothing. Raises OSError when no descriptor of it can be opened.
    """

    def __init__(self, pid: int, protocol: asyncio.SubprocessProtocol) -> None:
        super().__init__()
        self._pid, self._protocol = pid, protocol
        self._returncode: int | None = None
        self._is_silent = False
        self._loop = asyncio.get_running_loop()
        self._output: asyncio.ReadTransport | None = None
        self._handle = os.pidfd_open(pid)
        self._loop.add_reader(self._handle, self._on_end)
        protocol.connection_made(self)

    async def read(self, output: BinaryIO) -> None:
        """Passes on its output until that ends."""
        self._output, _ = await self._loop.connect_read_pipe(lambda: _ForkedOutput(self), output)

    def get_pid(self) -> int:
        return self._pid

    def get_returncode(self) -> int | None:
        """The exit status, below 0 that of a signal; None while it runs."""
        return self._returncode

    def send_signal(self, number: int) -> None:
        if self._returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Stops to read its output. A process that still runs is killed."""
        self.kill()
        if self._output is not None:
            self._output.close()

    def on_output(self, data: bytes) -> None:
        self._protocol.pipe_data_received(OUTPUT, data)

    def on_output_end(self) -> None:
        self._is_silent = True
        self._finish()

    def _on_end(self) -> None:
        self._loop.remove_reader(self._handle)
        os.close(self._handle)
        _, status = os.waitpid(self._pid, 0)
        self._returncode = os.waitstatus_to_exitcode(status)
        self._protocol.process_exited()
        self._finish()

    def _finish(self) -> None:
        if self._is_silent and self._returncode is not None:
            self._protocol.connection_lost(None)


class _ForkedOutput(asyncio.Protocol):
    def __init__(self, process: ForkedProcess) -> None:
        self._process = process

    def data_received(self, data: bytes) -> None:
        self._process.on_output(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._process.on_output_end()
