"""NIXL as this project uses it: an agent, the memory it may touch, one thread for all its calls.

    writer      add_peer(metadata) → write(peer, runs) …     a future ends when bytes have landed
    receiver    metadata, then notifications                 while `listening`

The library's own progress thread stays off: it spins, a whole core of it also while nothing moves.
So whoever writes asks for the state of its own writes, and a receiver looks often while it expects
something: bytes over TCP land only then. Writes carry no notification of their own, for a write
that has one ends when the peer has looked; without, on one machine, it ends when it is posted.

Everything here imports NIXL late: the library is an extra, and what is not installed is not there.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from ferryman.errors import ConfigError, InvalidRequest, Unavailable

log = logging.getLogger(__name__)

T = TypeVar("T")
Job = tuple[Callable[[], Any], "Future[Any]"]

HOST = -1
MAX_METADATA_BYTES = 1 << 16
MAX_HEARD = 4096
# How long the thread rests between two looks: at its own writes, and for those of others.
POLL_SECONDS = (20e-6, 1e-3)
LISTEN_SECONDS = 100e-6
# A message may have to wait for a connection, which comes about only while somebody looks.
SENDING_SECONDS = 2.0

ErrorHandling = Literal["peer", "none"]


@dataclass(frozen=True, slots=True)
class Region:
    """Memory that outlives the agent. `device` is HOST or the index of a CUDA device (untested)."""

    address: int
    num_bytes: int
    device: int = HOST


class Run(NamedTuple):
    """Bytes that lie in one piece on both sides."""

    local: int
    remote: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class NixlOptions:
    """`error_handling` "none" is faster by a tenth on one machine, and never notices a dead peer.

    `backend` are parameters of NIXL's UCX backend beyond that, by their names there.
    """

    error_handling: ErrorHandling = "peer"
    backend: tuple[tuple[str, str], ...] = ()

    @property
    def parameters(self) -> dict[str, str]:
        return {**dict(self.backend), "ucx_error_handling_mode": self.error_handling}


def has_nixl() -> bool:
    """Whether the extra is installed; nothing is loaded to find out."""
    return find_spec("nixl") is not None


def merged_runs(units: Iterable[Run], max_bytes: int = 1 << 62) -> list[Run]:
    """Neighbours on both sides become one run of at most `max_bytes`; order is kept."""
    found: list[Run] = []
    for unit in units:
        if found:
            local, remote, num_bytes = found[-1]
            follows = (local + num_bytes, remote + num_bytes) == (unit.local, unit.remote)
            if follows and num_bytes + unit.num_bytes <= max_bytes:
                found[-1] = Run(local, remote, num_bytes + unit.num_bytes)
                continue
        found.append(unit)
    return found


@contextmanager
def nixl_agent(
    name: str, regions: Sequence[Region], options: NixlOptions | None = None
) -> Iterator[NixlAgent]:
    """An agent for the length of a `with`. Raises ConfigError where NIXL cannot work."""
    agent = NixlAgent(name, regions, options or NixlOptions())
    try:
        yield agent
    finally:
        agent.close()


class NixlAgent:
    """One agent. Its name is unique in the cluster. Calls come from one event loop.

    Making and closing one takes half a second; do it in a thread where a loop should go on.
    """

    def __init__(self, name: str, regions: Sequence[Region], options: NixlOptions) -> None:
        self.name = name
        self._devices = {region.device for region in regions}
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._writes: list[_Write] = []
        self._num_listening = 0
        self._listen_until = 0.0
        self._is_closed = False
        self._closing = threading.Lock()
        self._library: Any = None
        self._regions: list[Any] = []
        self._heard: list[bytes] = []
        self._thread = threading.Thread(target=self._work, name=f"nixl-{name}", daemon=True)
        self._thread.start()
        try:
            self.metadata: bytes = self._submit(lambda: self._open(regions, options)).result()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends every connection: bytes on their way over a network never land. Blocks.

        A writer on this machine copies by itself and is not stopped by it; ask it, or its death.
        """
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                self._jobs.put(None)
        self._thread.join()

    # What a writer does.

    async def add_peer(self, metadata: bytes) -> str:
        """Makes a peer known; its name. Raises Unavailable if these are no metadata of an agent."""
        if len(metadata) > MAX_METADATA_BYTES:
            raise InvalidRequest(f"metadata of {len(metadata)} bytes are no agent's", "metadata")
        name = await self._call(lambda: self._library.add_remote_agent(metadata))
        return name.decode() if isinstance(name, bytes) else str(name)

    async def remove_peer(self, peer: str) -> None:
        """Ends the connection to a peer; later writes to it need `add_peer` again."""
        await self._call(lambda: self._library.remove_remote_agent(peer))

    def write(self, peer: str, runs: Sequence[Run], device: int = HOST) -> Future[None]:
        """Posts a write of `runs` into the peer's memory on `device`.

        The future ends when all bytes have landed, or with Unavailable when that can no longer be
        known. It cannot be cancelled: until it ends the memory is read, and the peer's written.
        """
        landed: Future[None] = Future()
        landed.set_running_or_notify_cancel()
        self._submit(lambda: self._post(peer, runs, device, landed))
        return landed

    def tell(self, peer: str, message: bytes) -> None:
        """Sends a message, in no order with writes; it may get lost with the connection."""
        self._submit(lambda: self._send(peer, message))

    # What a receiver does.

    def begin_listening(self) -> None:
        """What others write lands, and what they say is heard, until as many `end_listening`."""
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
        """What was said since the last call, by whomever."""
        return await self._call(self._take_heard)

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
        with self._closing:  # behind the last job nobody looks
            if not self._is_closed:
                self._jobs.put((fn, future))
                return future
        future.set_exception(Unavailable(f"the NIXL agent {self.name} is closed"))
        return future

    def _work(self) -> None:
        """Whatever ends it, nobody waits for this thread any more."""
        try:
            self._serve()
        except Exception:
            log.exception("nixl agent %s failed", self.name)
        finally:
            with self._closing:
                self._is_closed = True
            self._end()

    def _serve(self) -> None:
        rest = POLL_SECONDS[0]
        while True:
            try:
                job = self._jobs.get(timeout=self._rest(rest))
            except queue.Empty:
                is_moving = self._look()
                rest = POLL_SECONDS[0] if is_moving else min(2 * rest, POLL_SECONDS[1])
                continue
            if job is None:
                break
            _run(*job)
            self._look()

    def _rest(self, rest: float) -> float | None:
        """Without end when there is nothing to look at."""
        if self._writes:
            return rest
        return LISTEN_SECONDS if self._is_listening else None

    def _look(self) -> bool:
        """Ends the writes that have ended; with it the library makes progress. Whether any did."""
        if self._is_listening:
            self._listen()
        before = len(self._writes)
        self._writes = [write for write in self._writes if not write.has_ended(self._library)]
        return len(self._writes) != before

    def _listen(self) -> None:
        """Asking for notifications is what lets the library land what others write over TCP."""
        try:
            for messages in self._library.get_new_notifs().values():
                self._heard += messages
        except Exception:  # a peer that goes may fail it; the others still write
            log.debug("nixl look failed agent=%s", self.name, exc_info=True)
        del self._heard[:-MAX_HEARD]

    def _send(self, peer: str, message: bytes) -> None:
        self._library.send_notif(peer, message)
        self._listen_until = time.monotonic() + SENDING_SECONDS

    @property
    def _is_listening(self) -> bool:
        return self._num_listening > 0 or time.monotonic() < self._listen_until

    def _take_heard(self) -> list[bytes]:
        self._listen()
        heard, self._heard = self._heard, []
        return heard

    def _open(self, regions: Sequence[Region], options: NixlOptions) -> bytes:
        try:
            return self._opened(regions, options)
        except (ConfigError, Unavailable):
            raise
        except Exception as error:  # a library that does not load, say: there is gRPC for that
            raise Unavailable(f"NIXL: {error or type(error).__name__}") from error

    def _opened(self, regions: Sequence[Region], options: NixlOptions) -> bytes:
        api = _nixl_api()
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
        self._library = api.nixl_agent(self.name, config)
        self._library.create_backend("UCX", options.parameters)
        for region in regions:
            place = (region.address, region.num_bytes, max(region.device, 0), "")
            registered = self._library.register_memory([place], _segment(region.device))
            self._regions.append(registered)
        metadata: bytes = self._library.get_agent_metadata()
        return metadata

    def _post(self, peer: str, runs: Sequence[Run], device: int, landed: Future[None]) -> None:
        try:
            table = np.array(runs, dtype=np.uint64).reshape(-1, 3)
            (source,) = self._devices
            ours = _descriptors(table[:, 0], table[:, 2], source)
            theirs = _descriptors(table[:, 1], table[:, 2], device)
            library = self._library
            handle = library.initialize_xfer(
                "WRITE",
                library.get_xfer_descs(ours, _segment(source)),
                library.get_xfer_descs(theirs, _segment(device)),
                peer,
            )
            write = _Write(handle, library.transfer(handle), landed)
        except Exception as error:
            landed.set_exception(_as_unavailable(error))
            return
        if not write.has_ended(library):
            self._writes.append(write)

    def _end(self) -> None:
        """Closes the connections; the library is gone when nothing names it any more."""
        for write in self._writes:
            write.give_up()
        try:
            for registered in self._regions:
                self._library.deregister_memory(registered)
        except Exception:  # the library goes with what it has
            log.debug("nixl memory not released", exc_info=True)
        self._writes, self._regions, self._library = [], [], None
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return
            if job is not None:
                job[1].set_exception(Unavailable(f"the NIXL agent {self.name} is closed"))


class _Write:
    """A posted transfer and who waits for it."""

    def __init__(self, handle: Any, state: str, landed: Future[None]) -> None:
        self._handle, self._state, self._landed = handle, state, landed

    def has_ended(self, library: Any) -> bool:
        """Looks; a write that has ended is released and its future told."""
        try:
            if self._state == "PROC":
                self._state = library.check_xfer_state(self._handle)
            if self._state == "PROC":
                return False
        except Exception as error:
            self._fail(_as_unavailable(error))
            return True
        if self._state == "DONE":
            self._release()
            self._landed.set_result(None)
        else:
            self._fail(Unavailable("a NIXL write failed"))
        return True

    def give_up(self) -> None:
        self._fail(Unavailable("the NIXL agent was closed while it wrote"))

    def _fail(self, error: Exception) -> None:
        self._release()
        self._landed.set_exception(error)

    def _release(self) -> None:
        try:
            self._handle.release()
        except Exception:  # it stays with the agent until that ends
            log.debug("nixl write not released", exc_info=True)


def _run(fn: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(fn())
    except Exception as error:
        future.set_exception(_as_unavailable(error))


def _as_unavailable(error: Exception) -> Exception:
    """The library's errors have no common base; where they come from tells them."""
    if isinstance(error, Unavailable | ConfigError):
        return error
    if type(error).__name__.startswith("nixl"):
        return Unavailable(f"NIXL: {error}")
    return error


def _segment(device: int) -> str:
    return "DRAM" if device == HOST else "VRAM"


def _descriptors(addresses: Any, sizes: Any, device: int) -> Any:
    """[runs, 3]: address, length, device."""
    devices = np.full(len(addresses), max(device, 0), dtype=np.uint64)
    return np.stack([addresses, sizes, devices], axis=1)


def _nixl_api() -> ModuleType:
    """The library, with its words sent where ours go: by itself it writes to standard output."""
    raises = logging.raiseExceptions
    try:
        from nixl import _api
    except ImportError as error:
        raise ConfigError("NIXL is not installed: pip install 'ferryman[nixl]'") from error
    finally:
        logging.raiseExceptions = raises
    speaker = logging.getLogger("nixl")
    speaker.handlers.clear()
    speaker.propagate = True
    speaker.setLevel(logging.WARNING)
    found: ModuleType = _api
    return found
