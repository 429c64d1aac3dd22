"""The memory that a writer has borrowed from decode workers of its machine."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from ferryman.errors import Unavailable
from ferryman.wire.handoff.lent_memory import borrow
from ferryman.wire.handoff.memory_plane import FrameStore
from ferryman.wire.plane_values import MemoryGrant


class BorrowedMemories:
    """One memory for each ticket, fetched once. Calls come from one event loop."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._stores: dict[bytes, FrameStore] = {}
        self._fetching: dict[bytes, asyncio.Task[FrameStore]] = {}

    async def of(self, grant: MemoryGrant) -> FrameStore:
        """The memory of a grant. Raises Unavailable when it cannot be had."""
        if store := self._stores.get(grant.ticket):
            return store
        fetching = self._fetching.get(grant.ticket)
        if fetching is None:
            fetching = asyncio.create_task(self._fetch(grant))
            self._fetching[grant.ticket] = fetching
            fetching.add_done_callback(partial(self._fetched, grant.ticket))
        # Hand-offs that begin at the same time wait for one fetch; one that ends does not end it.
        return await asyncio.shield(fetching)

    def _fetched(self, ticket: bytes, fetching: asyncio.Task[FrameStore]) -> None:
        del self._fetching[ticket]
        if not fetching.cancelled():
            fetching.exception()  # those who waited have it; perhaps nobody waits any more

    async def _fetch(self, grant: MemoryGrant) -> FrameStore:
        if self._folder is None:
            raise Unavailable("this worker has no folder to borrow memory by")
        self._drop_ended()
        memory = await asyncio.to_thread(borrow, self._folder, grant)
        store = FrameStore(memory)
        self._stores[grant.ticket] = store
        return store

    def _drop_ended(self) -> None:
        """Memory of lenders that are gone; hand-offs that still use it keep it mapped."""
        for ticket, store in tuple(self._stores.items()):
            if store.memory.is_over:
                del self._stores[ticket]
                store.memory.close()

    async def run(self) -> None:
        """Gives everything back at the end."""
        try:
            await asyncio.Event().wait()
        finally:
            self.close()

    def close(self) -> None:
        while self._stores:
            _, store = self._stores.popitem()
            store.memory.close()
