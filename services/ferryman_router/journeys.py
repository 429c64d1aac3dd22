"""All requests under way, and those that ended lately: a client may come back for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from ferryman.errors import InvalidRequest, NotFound
from ferryman.wire.values import RequestTokens, TokenCursor
from ferryman_router.fleet import WorkerName
from ferryman_router.journey import Journey

MAX_ENDED = 2048
ENDED_SECONDS = 60.0


class Journeys:
    """Journeys by request id. Ended ones are kept for a minute, the latest `MAX_ENDED` of them."""

    def __init__(self) -> None:
        self._active: dict[str, Journey] = {}
        self._ended: OrderedDict[str, tuple[float, Journey]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._active)

    def __iter__(self) -> Iterator[Journey]:
        return iter(tuple(self._active.values()))

    def add(self, journey: Journey) -> None:
        """Raises InvalidRequest while another request of that id is under way."""
        request_id = journey.asked.request_id
        if request_id in self._active:
            raise InvalidRequest(f"request id {request_id} is in use", "request_id")
        self._ended.pop(request_id, None)
        self._active[request_id] = journey

    def end(self, journey: Journey, now: float) -> None:
        request_id = journey.asked.request_id
        if self._active.get(request_id) is journey:
            del self._active[request_id]
        self._ended[request_id] = (now, journey)
        self.forget(now)

    def forget(self, now: float) -> None:
        """Drops what ended more than a minute ago, and what is too much."""
        while self._ended:
            ended, _ = next(iter(self._ended.values()))
            if len(self._ended) <= MAX_ENDED and now - ended < ENDED_SECONDS:
                return
            self._ended.popitem(last=False)

    def find(self, request_id: str) -> Journey | None:
        if journey := self._active.get(request_id):
            return journey
        _, ended = self._ended.get(request_id, (0.0, None))
        return ended

    def get(self, request_id: str) -> Journey:
        """Raises NotFound for what was never known, or is forgotten."""
        journey = self.find(request_id)
        if journey is None:
            raise NotFound(f"request {request_id} is not known here, or was forgotten")
        return journey

    # What workers tell.

    def give(self, tokens: RequestTokens) -> None:
        """An entry of a frame; one for nobody is late, and dropped."""
        journey = self._active.get(tokens.request_id)
        if journey is not None:
            journey.take(tokens)

    def cursors(self, name: WorkerName) -> Iterator[TokenCursor]:
        """Where a decode worker should go on, for all its requests."""
        return (journey.cursor for journey in self if journey.is_decoded_by(name))

    def look(self, now: float) -> None:
        """Looks after everyone; called now and then."""
        for journey in self:
            journey.look(now)
        self.forget(now)

    def lost(self, name: WorkerName, cause: str) -> None:
        for journey in self:
            journey.lost(name, cause)
