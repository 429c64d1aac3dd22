"""Suspects one at a time: requests that ran on a worker when it died.

    a worker dies            all that ran on it are suspects: one of them may have killed it
    a suspect is tried       no other suspect is sent to a worker before it has drawn a token
    it kills that one too    it fails; the suspects that wait were not there
    it draws a token         it goes on as any other, and the next suspect is tried

Together they would die together again, and all would fail for what one of them did. A turn has an
end, for most deaths are chance: a suspect with a long prompt is computed while the next one is
tried. It begins when workers are found, since the one that died may be the only one.
"""

from __future__ import annotations

import asyncio

TURN_SECONDS = 2.0


class Probation:
    """Gives turns in the order of arrival. Used on the router's loop.

    A suspect waits for its turn as long as its deadline lets it.
    """

    def __init__(self, turn_seconds: float = TURN_SECONDS) -> None:
        self._turn_seconds = turn_seconds
        self._lock = asyncio.Lock()
        self._tried = ""
        self._end_of_turn: asyncio.TimerHandle | None = None

    async def enter(self, request_id: str) -> None:
        """Waits for this suspect's turn, which lasts until `leave`."""
        await self._lock.acquire()
        self._tried = request_id

    def sent(self, request_id: str) -> None:
        """Workers have the request; if it has a turn, that ends in a while by itself."""
        if self._tried == request_id:
            loop = asyncio.get_running_loop()
            self._end_of_turn = loop.call_later(self._turn_seconds, self.leave, request_id)

    def leave(self, request_id: str) -> None:
        """Ends the turn of this request, if it has one."""
        if self._tried != request_id:
            return
        if self._end_of_turn is not None:
            self._end_of_turn.cancel()
        self._tried, self._end_of_turn = "", None
        self._lock.release()
