"""The loans of one decode worker: which writer has which memory, and until when.

    Reserve          → `grant`: a ticket for the writer's life, told in an authenticated answer
    Unix socket      → the ticket, once → the descriptor; the loan ends with the connection
    LandPages        → `memory_of` the key that came with the descriptor

A writer fills its own memory and no other's, and decode copies from there (`memory_plane.py`). So
nothing has to be waited for when a writer is late, stopped or dead.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from hmac import compare_digest
from pathlib import Path

from ferryman.errors import LeaseLost
from ferryman.handoff.effects import WriterId
from ferryman.runtime.background import Background
from ferryman.wire.handoff.lent_memory import (
    BORROW_SECONDS,
    LENT_BYTES,
    TICKET_BYTES,
    LentMemory,
    hand_out,
    open_socket,
    place_of,
    sweep_sockets,
)
from ferryman.wire.plane_values import GrpcOnly, MemoryGrant, MemoryOffer

log = logging.getLogger(__name__)

# Memory is taken for a writer that fetched it: at most 512 MiB.
MAX_LOANS = 64
MAX_CALLERS = 64
AGAIN_SECONDS = 1.0


@dataclass(slots=True)
class _Loan:
    writer: WriterId
    ticket: bytes = field(default_factory=lambda: secrets.token_bytes(TICKET_BYTES))
    memory: LentMemory | None = None


@dataclass(frozen=True, slots=True)
class LenderStatistics:
    """Counts for the gauges: memories that are lent now, and callers without a ticket since the
    start."""

    lent: int
    refused: int


class MemoryLender:
    """All loans. Without a folder it lends nothing, and `trouble` says why."""

    def __init__(self, folder: Path | None, name: str, background: Background) -> None:
        """`name` is that of its socket in the folder."""
        self._folder, self._name, self._background = folder, name, background
        self._loans: dict[bytes, _Loan] = {}
        self._callers = asyncio.Semaphore(MAX_CALLERS)
        self._place = ""
        self._is_settled = asyncio.Event()
        self._num_refused = 0
        self.trouble = "its socket is not open yet" if folder else "it lends no memory"

    @property
    def place(self) -> str:
        """The place at which it lends; empty while it does not."""
        return self._place

    def statistics(self) -> LenderStatistics:
        lent = sum(loan.memory is not None for loan in self._loans.values())
        return LenderStatistics(lent, self._num_refused)

    def grant(self, writer: WriterId, offer: MemoryOffer) -> MemoryGrant | GrpcOnly:
        """The memory of this life of a writer: the same one as long as it has it."""
        if not self._place:
            return GrpcOnly(f"decode: {self.trouble}")
        if offer.place != self._place:
            return GrpcOnly("the workers share no folder of one machine")
        loan = next((kept for kept in self._loans.values() if kept.writer == writer), None)
        if loan is None and not self._has_room():
            return GrpcOnly(f"decode: it has lent memory to {MAX_LOANS} writers")
        loan = loan or _Loan(writer)
        self._loans[loan.ticket] = loan
        return MemoryGrant(self._name, loan.ticket, LENT_BYTES)

    def _has_room(self) -> bool:
        """Drops the oldest ticket for which nobody came, if there are too many."""
        if len(self._loans) < MAX_LOANS:
            return True
        unfetched = next((loan for loan in self._loans.values() if loan.memory is None), None)
        if unfetched is None:
            return False
        del self._loans[unfetched.ticket]
        return True

    def memory_of(self, key: bytes) -> memoryview:
        """The memory that a writer fills. Raises LeaseLost when the loan is over, or never was."""
        for loan in self._loans.values():
            if loan.memory is not None and compare_digest(loan.memory.key, key):
                return loan.memory.content
        raise LeaseLost("decode lends no memory of this key")

    async def listens(self) -> None:
        """Waits until it lends, or cannot."""
        await self._is_settled.wait()

    async def run(self) -> None:
        """Serves the socket; a folder that cannot hold it is a reason for gRPC, not an error."""
        if self._folder is None:
            return
        try:
            await asyncio.to_thread(sweep_sockets, self._folder)
            listening = open_socket(self._folder, self._name)
        except OSError as error:
            self.trouble = f"no socket in its folder: {error.strerror}"
            log.warning("hand-offs go by gRPC, %s holds no socket: %s", self._folder, error)
            self._is_settled.set()
            return
        try:
            self._place = place_of(self._folder)
            self._is_settled.set()
            await self._serve(listening)
        finally:
            self._place = ""
            listening.close()
            (self._folder / self._name).unlink(missing_ok=True)
            for loan in tuple(self._loans.values()):
                self._end(loan)

    async def _serve(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._callers.acquire()
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as error:  # such as too many open files, which pass
                log.warning("nobody can be lent memory at the moment: %s", error)
                self._callers.release()
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            connection.setblocking(False)
            self._background.start(self._answer(connection))

    async def _answer(self, connection: socket.socket) -> None:
        """Serves one connection to its end. Nothing is said to a caller without a ticket."""
        loan: _Loan | None = None
        try:
            with suppress(OSError, TimeoutError):
                try:
                    loan = await self._lent_to(connection)
                finally:
                    self._callers.release()
                if loan is not None:
                    await asyncio.get_running_loop().sock_recv(connection, 1)
        finally:
            connection.close()
            if loan is not None:
                self._end(loan)

    async def _lent_to(self, connection: socket.socket) -> _Loan | None:
        async with asyncio.timeout(BORROW_SECONDS):
            ticket = await _exactly(connection, TICKET_BYTES)
        if not ticket:  # another lender that starts has looked whether this one lives
            return None
        loan = self._loans.get(ticket)
        if loan is None or loan.memory is not None:
            self._num_refused += 1
            log.warning("a caller at %s showed no ticket that counts", self._name)
            return None
        try:
            memory = await asyncio.to_thread(LentMemory)
        except OSError as error:
            log.warning("no memory to lend, hand-offs go by gRPC: %s", error)
            return None
        if loan.memory is not None or self._loans.get(ticket) is not loan:  # meanwhile
            memory.close()
            return None
        loan.memory = memory
        try:
            hand_out(connection, memory)
        except OSError:
            self._end(loan)
            raise
        return loan

    def _end(self, loan: _Loan) -> None:
        """The memory goes back; the writer's next Reserve gets another ticket."""
        self._loans.pop(loan.ticket, None)
        memory, loan.memory = loan.memory, None
        if memory is not None:
            memory.close()


async def _exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """Fewer only if the caller hangs up."""
    loop, heard = asyncio.get_running_loop(), b""
    while len(heard) < num_bytes:
        more = await loop.sock_recv(connection, num_bytes - len(heard))
        if not more:
            break
        heard += more
    return heard
