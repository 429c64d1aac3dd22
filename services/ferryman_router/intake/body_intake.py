"""Reads what callers send: parses, renders and tokenizes it off the event loop.

Nothing on the loop may take longer because one caller's body is large; the loop carries the tokens
of all others. Small bodies are read by threads, which share the interpreter's lock (GIL) with the
loop: `bodies.json_body` and `ferryman.text.text_encoder` give it back. Large ones would still take
it half of the time, and every token needs it several times: another process reads those.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ferryman.errors import DeadlineExceeded, QueueFull, Stopping, Unavailable
from ferryman.settings.sources import without_settings
from ferryman_router.intake.reader import ReaderMessage, receive_message, send_message

log = logging.getLogger(__name__)

T = TypeVar("T")

QUICK_BYTES = 4096  # under a millisecond, on the loop
LARGE_BYTES = 64 << 10
NUM_THREADS = 4  # for what is neither quick nor large, so that it does not wait behind large ones
MAX_HELD_BYTES = 512 << 20
# A process that hangs is ended. No body takes as long, even on a machine busy with other work.
MAX_SILENT_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class _Running:
    """One life of the process, and the router's end of the socket to it."""

    process: subprocess.Popen[bytes]
    socket: socket.socket

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.socket.close()


class ReaderProcess:
    """A process that starts when it is first needed, and again after a death. One thread asks, any
    closes.

    The process ends by itself when the router is gone: it reads the end of its socket.
    """

    def __init__(
        self, command: Sequence[str], max_silent_seconds: float = MAX_SILENT_SECONDS
    ) -> None:
        self._command, self._max_silent_seconds = command, max_silent_seconds
        self._asking, self._lock = threading.Lock(), threading.Lock()
        self._running: _Running | None = None
        self._is_closed = False

    @classmethod
    def for_model(cls, folder: Path, model_id: str) -> ReaderProcess:
        """A reader that knows the model that is served."""
        return cls((sys.executable, "-m", "ferryman_router.intake.reader", str(folder), model_id))

    @property
    def process_id(self) -> int | None:
        """Process id of the current reader, or None before it first starts."""
        return self._running.process.pid if self._running is not None else None

    def start(self) -> None:
        """Starts it before it is needed, so that no caller waits for it; raises Unavailable."""
        with self._lock:
            if self._is_closed:
                raise Stopping("this router is ending; ask again when there is another one")
            if self._running is not None and self._running.process.poll() is not None:
                self._running.end()  # it died idle, without any request
                self._running = None
            if self._running is None:
                self._running = self._new()

    def ask(self, message: ReaderMessage) -> ReaderMessage:
        """The answer of the process. Blocks; the interpreter's lock is free meanwhile.

        Raises Unavailable when the process ends first. The message is not asked again here: it
        may be the one that ends the process, and the caller knows whether it is worth another try.
        """
        with self._asking:
            self.start()
            running = self._running
            assert running is not None
            try:
                send_message(running.socket, message)
                return receive_message(running.socket)
            except (OSError, ValueError) as error:
                running.end()
                log.warning("reader ended pid=%d error=%r", running.process.pid, error)
                raise Unavailable(
                    "the process that reads large bodies ended; send this one again"
                ) from error

    def close(self) -> None:
        """Ends the process; a caller that waits for it gets Unavailable."""
        with self._lock:
            self._is_closed = True
            if self._running is not None:
                self._running.process.kill()
        # A caller that asks has read the end of the socket, or is about to.
        with self._asking:
            if self._running is not None:
                self._running.end()

    def _new(self) -> _Running:
        ours, theirs = socket.socketpair()
        ours.settimeout(self._max_silent_seconds)
        with theirs:
            try:
                # Standard output is the router's own: the program that started the router reads it.
                process = subprocess.Popen(
                    self._command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    # The reader of strangers' bodies has no use for the router's API keys.
                    env=without_settings(os.environ),
                )
            except OSError as error:
                ours.close()
                raise Unavailable(f"large bodies cannot be read here now: {error}") from error
        log.info("reader started pid=%d", process.pid)
        return _Running(process, ours)


class BodyMemory:
    """Counts the bytes of bodies that were received and not yet read."""

    def __init__(self, max_bytes: int = MAX_HELD_BYTES) -> None:
        self._max_bytes, self.num_bytes = max_bytes, 0

    @contextmanager
    def holding(self) -> Iterator[Callable[[int], None]]:
        """Counts one body while the block runs. The block gets a call by which that body grows,
        and which raises QueueFull when all bodies together are too much."""
        held = 0

        def grow(num_bytes: int) -> None:
            nonlocal held
            if self.num_bytes + num_bytes > self._max_bytes:
                raise QueueFull(f"bodies of {self.num_bytes} bytes wait to be read")
            held += num_bytes
            self.num_bytes += num_bytes

        try:
            yield grow
        finally:
            self.num_bytes -= held


class Intake:
    """Runs quick work at once and longer work in threads, large work few at a time.

    Large bodies are not read here: `reader` gets them, one at a time.
    """

    def __init__(self, reader: ReaderProcess, num_large: int = 0) -> None:
        # Half of the cores: the others are for the loop, and for the workers of this machine.
        self.num_large = num_large or max(1, (os.cpu_count() or 1) // 2)
        self._threads = ThreadPoolExecutor(NUM_THREADS, "intake")
        self._large = ThreadPoolExecutor(self.num_large, "intake-large")
        self._reader, self._asking = reader, ThreadPoolExecutor(1, "intake-reader")

    def start_reader(self) -> None:
        """Starts the other process, so that the first large body need not wait for it."""
        self._asking.submit(self._reader.start)

    async def ask(self, message: ReaderMessage, *, within: float) -> ReaderMessage:
        """The reader's answer; raises as `run` does, and Unavailable when the reader ends."""
        return await self._run_in(self._asking, lambda: self._reader.ask(message), within)

    async def run(self, num_bytes: int, work: Callable[[], T], *, within: float) -> T:
        """The result of `work`. DeadlineExceeded when it did not begin and end `within` seconds."""
        if num_bytes <= QUICK_BYTES:
            return work()
        threads = self._large if num_bytes > LARGE_BYTES else self._threads
        return await self._run_in(threads, work, within)

    async def _run_in(self, threads: ThreadPoolExecutor, work: Callable[[], T], within: float) -> T:
        try:
            async with asyncio.timeout(within):
                return await asyncio.get_running_loop().run_in_executor(threads, work)
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed while the prompt was read") from None

    def close(self) -> None:
        """Takes nothing more; what has not begun is dropped, and a thread ends with its work."""
        for threads in (self._threads, self._large, self._asking):
            threads.shutdown(wait=False, cancel_futures=True)
