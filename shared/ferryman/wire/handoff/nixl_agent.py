"""NIXL as this project uses it: an agent, the memory it may touch, one thread for all its calls.

    writer      add_peer(metadata) → write(peer, runs) …     a future ends when bytes have landed
    receiver    metadata, then notifications                 while `listening`

The library's own progress thread stays off, because it keeps a whole core busy even without
traffic. So a writer polls its own writes, and a receiver polls while it expects data: bytes over
TCP land only then. Both poll less and less often while nothing happens, since a prompt that is
being computed needs the processor more. Writes carry no notification: a write with one ends only
when the peer has polled; without one, on one machine, it ends when it is posted.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from ferryman.errors import InvalidRequest, Unavailable
from ferryman.wire.handoff.host_network import ListeningSocket
from ferryman.wire.handoff.nixl_library import (
    ON_LOOPBACK,
    MemoryRegion,
    NixlLibrary,
    NixlOptions,
    WriteRuns,
    as_unavailable,
)

log = logging.getLogger(__name__)

T = TypeVar("T")
Job = tuple[Callable[[], Any], "Future[Any]"]

MAX_METADATA_BYTES = 1 << 16
MAX_HEARD = 4096
# The shortest and the longest pause of the thread between two polls. A pause of 2 ms takes a third
# from what a receiver lands over TCP, one of 0.1 ms a quarter of a core.
POLL_SECONDS = (20e-6, 1e-3)
# A first message to a peer may have to wait for a connection, which is made only while the thread
# polls; a later one leaves at once, but for a socket that is full.
CONNECTING_SECONDS = 2.0
SENDING_SECONDS = 0.01


@contextmanager
def nixl_agent(
    name: str, regions: Sequence[MemoryRegion], options: NixlOptions = ON_LOOPBACK
) -> Iterator[NixlAgent]:
    """An agent for the length of a `with`. Raises ConfigError if NIXL cannot work."""
    agent = NixlAgent(name, regions, options)
    try:
        yield agent
    finally:
        agent.close()


class NixlAgent:
    """One agent. Its name is unique in the cluster. Calls come from one event loop.

    Making and closing one takes half a second; use a thread if an event loop must go on.
    """

    def __init__(self, name: str, regions: Sequence[MemoryRegion], options: NixlOptions) -> None:
        self.name = name
        # A Queue: SimpleQueue.get waits without end when its deadline passes at the wrong moment.
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._num_listening = 0
        self._first_sent: dict[str, float] = {}
        self._listen_until = 0.0
        self._is_closed = False
        self._closing = threading.Lock()
        self._library = NixlLibrary(name)
        self._heard: list[bytes] = []
        self._wanted: Future[list[bytes]] | None = None
        self._thread = threading.Thread(target=self._work, name=f"nixl-{name}", daemon=True)
        self._thread.start()
        try:
            opening = self._submit(lambda: self._library.open(regions, options))
            self.metadata: bytes = opening.result()
        except BaseException:
            self.close()
            raise

    @property
    def unlocked_ports(self) -> tuple[ListeningSocket, ...]:
        """The sockets that the library opened for this agent; they ask for no credential."""
        return self._library.unlocked_ports

    def close(self) -> None:
        """Ends every connection: bytes still in the network never land. Blocks.

        A writer on this machine copies by itself and is not stopped by it; wait until it stops or
        dies.
        """
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                self._jobs.put(None)
        self._thread.join()

    # Calls of a writer.

    async def add_peer(self, metadata: bytes) -> str:
        """Makes a peer known and returns its name. Raises Unavailable for invalid metadata."""
        if len(metadata) > MAX_METADATA_BYTES:
            raise InvalidRequest(f"metadata of {len(metadata)} bytes are no agent's", "metadata")
        return await self._call(lambda: self._library.add_peer(metadata))

    async def remove_peer(self, peer: str) -> None:
        """Ends the connection to a peer; later writes to it need `add_peer` again."""
        await self._call(lambda: self._remove(peer))

    def write(self, peer: str, runs: WriteRuns) -> Future[None]:
        """Posts a write of `runs` into the peer's memory.

        The future ends when all bytes have landed, or with Unavailable when that can no longer be
        known. It cannot be cancelled: until it ends, NIXL reads the memory and writes the peer's.
        """
        landed: Future[None] = Future()
        landed.set_running_or_notify_cancel()

        def end_unposted(posting: Future[None]) -> None:
            if (error := posting.exception()) is not None:
                landed.set_exception(error)

        posting = self._submit(lambda: self._library.post(peer, runs, landed))
        posting.add_done_callback(end_unposted)
        return landed

    def tell(self, peer: str, message: bytes) -> None:
        """Sends a message, in no order with writes. It may be lost with the connection."""
        self._submit(lambda: self._send(peer, message))

    # Calls of a receiver.

    def begin_listening(self) -> None:
        """Polls, so that others' writes land and their messages arrive, until as many
        `end_listening`."""
        self._change_listening(1)

    def end_listening(self) -> None:
        self._change_listening(-1)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """The same for the length of a block."""
        self.begin_listening()
        try:
            yield
        finally:
            self.end_listening()

    async def notifications(self) -> list[bytes]:
        """Waits for messages of peers; all since the last call. For one caller at a time.

        Raises Unavailable once the agent is closed.
        """
        wanted: Future[list[bytes]] = Future()
        await self._call(lambda: self._want(wanted))
        return await asyncio.wrap_future(wanted)

    # The thread.

    def _change_listening(self, change: int) -> None:
        def apply() -> None:
            self._num_listening += change

        self._submit(apply)

    async def _call(self, fn: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._submit(fn))

    def _submit(self, fn: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        with self._closing:  # no thread takes a job after the last one
            if not self._is_closed:
                self._jobs.put((fn, future))
                return future
        future.set_exception(Unavailable(f"the NIXL agent {self.name} is closed"))
        return future

    def _work(self) -> None:
        """Serves until the end; afterwards, also after an error, refuses all waiting and new
        jobs."""
        try:
            self._serve()
        except Exception:
            log.exception("nixl agent %s failed", self.name)
        finally:
            with self._closing:
                self._is_closed = True
            self._end()

    def _serve(self) -> None:
        pause = POLL_SECONDS[0]
        while True:
            try:
                job = self._jobs.get(timeout=pause if self._is_polling else None)
            except queue.Empty:
                pause = next_pause(pause, is_moving=self._look())
                continue
            if job is None:
                break
            _run(*job)
            self._look()
            pause = POLL_SECONDS[0]

    @property
    def _is_polling(self) -> bool:
        return self._library.is_writing or self._is_listening

    def _look(self) -> bool:
        """Settles the writes that have ended, and lets others' writes land. Returns whether any has
        ended, or a message has come."""
        has_heard = self._is_listening and self._listen()
        return self._library.settle() or has_heard

    def _listen(self) -> bool:
        came = self._library.notifications()
        self._heard += came
        del self._heard[:-MAX_HEARD]
        self._hand_over()
        return bool(came)

    def _want(self, wanted: Future[list[bytes]]) -> None:
        self._wanted = wanted
        self._listen()

    def _hand_over(self) -> None:
        """Gives received messages to the caller that waits; one that has left takes none."""
        if self._heard and (wanted := self._wanted):
            self._wanted = None
            if wanted.set_running_or_notify_cancel():
                heard, self._heard = self._heard, []
                wanted.set_result(heard)

    def _send(self, peer: str, message: bytes) -> None:
        self._library.send(peer, message)
        now = time.monotonic()
        connected = self._first_sent.setdefault(peer, now) + CONNECTING_SECONDS
        self._listen_until = max(self._listen_until, connected, now + SENDING_SECONDS)

    def _remove(self, peer: str) -> None:
        self._first_sent.pop(peer, None)
        self._library.remove_peer(peer)

    @property
    def _is_listening(self) -> bool:
        return self._num_listening > 0 or time.monotonic() < self._listen_until

    def _end(self) -> None:
        self._library.close()
        if self._wanted is not None and self._wanted.set_running_or_notify_cancel():
            self._wanted.set_exception(Unavailable(f"the NIXL agent {self.name} is closed"))
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return
            if job is not None:
                job[1].set_exception(Unavailable(f"the NIXL agent {self.name} is closed"))


def next_pause(pause: float, *, is_moving: bool) -> float:
    """Seconds until the next poll: short while anything moves, and longer and longer otherwise."""
    shortest, longest = POLL_SECONDS
    return shortest if is_moving else min(2 * pause, longest)


def _run(fn: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(fn())
    except Exception as error:
        future.set_exception(as_unavailable(error))
