"""The part of the NIXL library that this project calls.

One agent of the library with the writes that it has posted. Every call comes from one thread: that
of `nixl_agent.NixlAgent`, which all other code uses. The library is an extra and imported late,
because it may not be installed; its names and its errors become ours here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ferryman.errors import ConfigError, Unavailable
from ferryman.wire.handoff.host_network import (
    LOOPBACK,
    ListeningSocket,
    UcxDevice,
    listening_sockets,
)

log = logging.getLogger(__name__)

HOST = -1

ErrorHandling = Literal["peer", "none"]


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """Memory that lives longer than the agent. `device` is HOST or the index of a CUDA device
    (untested)."""

    address: int
    num_bytes: int
    device: int = HOST


class WriteRun(NamedTuple):
    """Bytes in one piece on both sides. Devices as of `MemoryRegion`."""

    local: int
    remote: int
    num_bytes: int
    local_device: int = HOST
    remote_device: int = HOST


# Many runs: an int64 [runs, 5] with the fields of a WriteRun.
RunTable = NDArray[np.int64]
WriteRuns = Sequence[WriteRun] | RunTable


@dataclass(frozen=True, slots=True)
class NixlOptions:
    """`device` is the only one on which UCX listens and connects; "" leaves it to UCX_NET_DEVICES.

    `error_handling` "none" is faster by a tenth on one machine, but never notices a dead peer. With
    `has_keys_only` UCX has the transports alone on which a writer needs a key: RDMA's.
    """

    device: UcxDevice
    error_handling: ErrorHandling = "peer"
    has_keys_only: bool = False

    @property
    def parameters(self) -> dict[str, str]:
        """Parameters of NIXL's UCX backend. Its own device_list works for RDMA cards only."""
        bound = {"engine_config": f"NET_DEVICES={self.device.name}"} if self.device.name else {}
        return {**bound, "ucx_error_handling_mode": self.error_handling}


# The switch of UCX for all agents of a process. Copies to and from cards are no way in.
TRANSPORTS, WITH_KEYS = "UCX_TLS", "rc,ud,dc,cuda_copy"
ON_LOOPBACK = NixlOptions(UcxDevice(LOOPBACK))


def has_nixl() -> bool:
    """Whether the extra is installed; does not load it."""
    return find_spec("nixl") is not None


def merged_runs(runs: RunTable) -> RunTable:
    """Merges runs that follow each other on both sides; keeps the order."""
    if not len(runs):
        return runs
    ends = runs[:-1, :2] + runs[:-1, 2:3]
    follows = (ends == runs[1:, :2]).all(axis=1) & (runs[:-1, 3:] == runs[1:, 3:]).all(axis=1)
    firsts = np.flatnonzero(np.concatenate(([True], ~follows)))
    merged = runs[firsts]
    merged[:, 2] = np.add.reduceat(runs[:, 2], firsts)
    return merged


class NixlLibrary:
    """One agent of the library, from `open` to `close`, and its unfinished writes.

    `unlocked_ports` are the sockets that the library opened: none of them asks for a credential.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._agent: Any = None
        self._regions: list[Any] = []
        self._writes: list[_Write] = []
        self.unlocked_ports: tuple[ListeningSocket, ...] = ()

    @property
    def is_writing(self) -> bool:
        return bool(self._writes)

    def open(self, regions: Sequence[MemoryRegion], options: NixlOptions) -> bytes:
        """The agent's metadata. Raises ConfigError or Unavailable if NIXL cannot work."""
        try:
            if options.has_keys_only:
                os.environ[TRANSPORTS] = WITH_KEYS
            before = listening_sockets(os.getpid())
            metadata = self._opened(regions, options)
            # The library does not say where it listens, so the kernel is asked.
            opened = listening_sockets(os.getpid()) - before
            self.unlocked_ports = tuple(sorted(opened, key=str))
            if options.has_keys_only and self.unlocked_ports:
                raise Unavailable(f"NIXL opened {self.unlocked_ports[0]}, which asks for no key")
            return metadata
        except (ConfigError, Unavailable):
            raise
        except Exception as error:  # for example a library that does not load; gRPC still works
            raise Unavailable(f"NIXL: {error or type(error).__name__}") from error

    def _opened(self, regions: Sequence[MemoryRegion], options: NixlOptions) -> bytes:
        api = _nixl_api()
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
        self._agent = api.nixl_agent(self._name, config)
        self._agent.create_backend("UCX", options.parameters)
        wanted = {f"{_segment(region.device)}_SEG" for region in regions}
        if lacking := wanted.difference(self._agent.get_backend_mem_types("UCX")):
            raise Unavailable(f"NIXL's UCX knows no {', '.join(sorted(lacking))} here")
        for region in regions:
            place = (region.address, region.num_bytes, max(region.device, 0), "")
            self._regions.append(self._agent.register_memory([place], _segment(region.device)))
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata

    def add_peer(self, metadata: bytes) -> str:
        name = self._agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove_peer(self, peer: str) -> None:
        self._agent.remove_remote_agent(peer)

    def post(self, peer: str, runs: WriteRuns, landed: Future[None]) -> None:
        """Begins a write of `runs`; `landed` gets its end. Each side of all is a host's or cards'
        memory."""
        try:
            write = _Write(*self._posted(peer, runs), landed)
        except Exception as error:
            landed.set_exception(as_unavailable(error))
            return
        if not write.has_ended(self._agent):
            self._writes.append(write)

    def _posted(self, peer: str, runs: WriteRuns) -> tuple[Any, str]:
        """The library's handle of the transfer, and its state."""
        table = np.asarray(runs, dtype=np.int64).reshape(-1, len(WriteRun._fields))
        ours, theirs = (
            self._agent.get_xfer_descs(
                _descriptors(table[:, side], table[:, 2], table[:, 3 + side]),
                _segment(int(table[0, 3 + side])),
            )
            for side in (0, 1)
        )
        handle = self._agent.initialize_xfer("WRITE", ours, theirs, peer)
        return handle, self._agent.transfer(handle)

    def settle(self) -> bool:
        """Ends the futures of writes that have ended, which also lets the library make progress.
        Returns whether there was any."""
        before = len(self._writes)
        self._writes = [write for write in self._writes if not write.has_ended(self._agent)]
        return len(self._writes) != before

    def send(self, peer: str, message: bytes) -> None:
        self._agent.send_notif(peer, message)

    def notifications(self) -> list[bytes]:
        """Reads the notifications. This call also makes the library land others' writes over
        TCP."""
        try:
            return [
                payload
                for payloads in self._agent.get_new_notifs().values()
                for payload in payloads
            ]
        except Exception:  # a peer that leaves may make it fail; the others still write
            log.debug("nixl look failed agent=%s", self._name, exc_info=True)
            return []

    def close(self) -> None:
        """Closes the connections; the library's agent ends when it has no reference any more."""
        for write in self._writes:
            write.give_up()
        try:
            for registered in self._regions:
                self._agent.deregister_memory(registered)
        except Exception:  # the library ends with all that it holds
            log.debug("nixl memory not released", exc_info=True)
        self._writes, self._regions, self._agent = [], [], None


class _Write:
    """A posted transfer and its waiting future."""

    def __init__(self, handle: Any, state: str, landed: Future[None]) -> None:
        self._handle, self._state, self._landed = handle, state, landed

    def has_ended(self, library: Any) -> bool:
        """Polls the transfer; releases it and ends its future once it has ended."""
        try:
            if self._state == "PROC":
                self._state = library.check_xfer_state(self._handle)
            if self._state == "PROC":
                return False
        except Exception as error:
            self._fail(as_unavailable(error))
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


def as_unavailable(error: Exception) -> Exception:
    """The library's errors have no common base class; the name of their class identifies them."""
    if isinstance(error, Unavailable | ConfigError):
        return error
    if type(error).__name__.startswith("nixl"):
        return Unavailable(f"NIXL: {error}")
    return error


def _segment(device: int) -> str:
    return "DRAM" if device == HOST else "VRAM"


def _descriptors(addresses: RunTable, sizes: RunTable, devices: RunTable) -> NDArray[np.uint64]:
    """[runs, 3]: address, length, device."""
    columns = [addresses, sizes, np.maximum(devices, 0)]
    return np.stack(columns, axis=1).astype(np.uint64)


def _nixl_api() -> ModuleType:
    """The library, with its log sent to ours: by default it writes to standard output."""
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
    api: ModuleType = _api
    return api
