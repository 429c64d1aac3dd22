"""Memory that a process lends to another one of its machine: a memfd, and its way there.

    lender      makes the memory, seals its size, reads it         `LentMemory`
    borrower    shows a ticket at a Unix socket, fills the memory   `borrow`

The memory has no name, so a process has it only if the lender hands it the descriptor. Its size
is sealed: neither side can make the other one read behind its end (SIGBUS). The socket lies in a
folder that both see, with a mode for its owner alone. The connection lasts as long as the loan:
the kernel closes it when the borrower ends.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

from ferryman.errors import Unavailable
from ferryman.wire.plane_values import MemoryGrant

TICKET_BYTES = KEY_BYTES = 32
# A message costs as much as copying 1 MiB. A larger frame would keep decode's event loop: this one
# takes 0.7 ms.
FRAME_BYTES = 4 << 20
# One frame is filled and one is copied from while others wait. More of them would not stay in the
# processor's cache, where a copy costs little beside those from and into the slots.
LENT_BYTES = 4 * FRAME_BYTES
BORROW_SECONDS = 2.0
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PREFIX, SUFFIX = "ferryman-lender-", ".sock"

_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
# Populated at once: else each page of the first frames would be a fault.
_SHARED = mmap.MAP_SHARED | mmap.MAP_POPULATE
_SOCKET_NAME = re.compile(re.escape(PREFIX) + r"[a-z0-9_-]{1,80}" + re.escape(SUFFIX))


def place_of(folder: Path) -> str:
    """Equal for two processes that see this very folder of this very machine, also by other paths
    and from other containers. Raises OSError if there is no such folder."""
    at = folder.stat()
    text = f"{BOOT_ID.read_text().strip()}:{at.st_dev}:{at.st_ino}"
    return xxhash.xxh3_64_hexdigest(text.encode())


def socket_name(worker_id: str, epoch: int) -> str:
    return f"{PREFIX}{worker_id}-{epoch:016x}{SUFFIX}"


class LentMemory:
    """The lender's side. It only reads."""

    def __init__(self, num_bytes: int = LENT_BYTES) -> None:
        """Takes the memory at once, because too little of it would be a SIGBUS later. Raises
        OSError."""
        self.key = secrets.token_bytes(KEY_BYTES)
        self.descriptor = os.memfd_create("ferryman-lent", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self.descriptor, 0, num_bytes)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_SEAL)
            mapped = mmap.mmap(self.descriptor, num_bytes, flags=_SHARED, prot=mmap.PROT_READ)
            self.content = memoryview(mapped)
        except BaseException:
            os.close(self.descriptor)
            raise

    def close(self) -> None:
        """Gives the memory back as soon as no copy reads it and no borrower maps it."""
        os.close(self.descriptor)


class BorrowedMemory:
    """The borrower's side; `content` is writable. Close it when no frame is being filled."""

    def __init__(self, connection: socket.socket, key: bytes, content: memoryview) -> None:
        """`key` names the memory to its lender."""
        self._connection = connection
        self.key, self.content = key, content

    @property
    def is_over(self) -> bool:
        """Whether the lender has ended the loan, or has ended itself."""
        try:
            return not self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self._connection.close()


def borrow(folder: Path, grant: MemoryGrant) -> BorrowedMemory:
    """Fetches the memory of a grant; blocks for `BORROW_SECONDS` at most in each of its steps.

    Raises Unavailable when the lender is not there, or hands out something else.
    """
    if not _SOCKET_NAME.fullmatch(grant.socket):
        raise Unavailable(f"{grant.socket!r} is no name of a lender's socket")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(BORROW_SECONDS)
        with short_path(folder, grant.socket) as path:
            connection.connect(path)
        connection.sendall(grant.ticket)
        key, descriptor = _received(connection)
        # With its time limit, a look at the connection would wait that long and call it over.
        connection.setblocking(False)
        try:
            return BorrowedMemory(connection, key, _mapped(descriptor, grant.num_bytes))
        finally:
            os.close(descriptor)  # the map keeps the memory
    except OSError as error:
        connection.close()
        raise Unavailable(f"{grant.socket} lends no memory: {error}") from error
    except BaseException:
        connection.close()
        raise


def hand_out(connection: socket.socket, memory: LentMemory) -> None:
    """Gives a borrower the descriptor, and the memory's key. Raises OSError."""
    socket.send_fds(connection, [memory.key], [memory.descriptor])


def _received(connection: socket.socket) -> tuple[bytes, int]:
    key, descriptors, _, _ = socket.recv_fds(connection, KEY_BYTES, 1)
    if len(key) == KEY_BYTES and len(descriptors) == 1:
        return key, descriptors[0]
    for descriptor in descriptors:
        os.close(descriptor)
    raise Unavailable("the lender does not know the ticket")


def _mapped(descriptor: int, num_bytes: int) -> memoryview:
    """Raises Unavailable unless it is memory of that size for ever."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise Unavailable(f"what was lent is no memory: {error}") from error
    if seals & _SIZE_SEALS != _SIZE_SEALS or os.fstat(descriptor).st_size != num_bytes:
        raise Unavailable(f"what was lent does not keep a size of {num_bytes} bytes")
    return memoryview(mmap.mmap(descriptor, num_bytes, flags=_SHARED))


@contextmanager
def short_path(folder: Path, name: str) -> Iterator[str]:
    """A path of a socket that fits its 107 bytes, however long the folder's path is."""
    at = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{at}/{name}"
    finally:
        os.close(at)


def open_socket(folder: Path, name: str) -> socket.socket:
    """A socket that listens in the folder under that name, for its owner alone. Raises OSError."""
    listening, draft = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), f".{name}"
    try:
        # A socket's file has the mode of its inode before it is bound.
        os.fchmod(listening.fileno(), 0o600)
        with short_path(folder, draft) as path:
            listening.bind(path)
        listening.listen(16)
        listening.setblocking(False)
        # Its name appears once it answers: a socket that refuses is one whose process is gone.
        (folder / draft).rename(folder / name)
    except BaseException:
        listening.close()
        with suppress(OSError):
            (folder / draft).unlink()
        raise
    return listening


def sweep_sockets(folder: Path) -> tuple[Path, ...]:
    """Removes the sockets of lenders that are gone, such as after a SIGKILL; returns their
    paths."""
    paths = sorted(folder.glob(f"{PREFIX}*{SUFFIX}"))
    # A draft refuses for a moment before its process listens.
    drafts = sorted(path for path in folder.glob(f".{PREFIX}*{SUFFIX}") if _is_old(path))
    stale = tuple(path for path in (*paths, *drafts) if _is_stale(path))
    for path in stale:
        path.unlink(missing_ok=True)
    return stale


def _is_old(path: Path) -> bool:
    with suppress(OSError):
        return time.time() - path.lstat().st_mtime > BORROW_SECONDS
    return False


def _is_stale(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(BORROW_SECONDS)
        with suppress(OSError), short_path(path.parent, path.name) as short:
            try:
                asking.connect(short)
            except ConnectionRefusedError:
                return True
    return False
