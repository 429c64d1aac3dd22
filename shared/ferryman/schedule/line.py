"""The line of requests without slots: by arrival, whether they are new or were pushed back."""

from __future__ import annotations

from bisect import insort
from dataclasses import replace

from ferryman.cache.resume import HostView
from ferryman.schedule.sequence import Waiting


class WaitingLine:
    """Lower `order` first: a request that was retracted stands where it stood."""

    def __init__(self) -> None:
        self._waiting: list[Waiting] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return any(waiting.request.request_id == request_id for waiting in self._waiting)

    @property
    def num_tokens(self) -> int:
        """Of all prompts that wait."""
        return sum(waiting.request.prompt_len for waiting in self._waiting)

    @property
    def head(self) -> Waiting | None:
        return self._waiting[0] if self._waiting else None

    def enter(self, waiting: Waiting) -> None:
        insort(self._waiting, waiting, key=lambda waiting: waiting.order)

    def offer_host(self, request_id: str, host: HostView) -> bool:
        """Gives a request that waits another view of the host tier; False when it is not here."""
        for index, waiting in enumerate(self._waiting):
            if waiting.request.request_id == request_id:
                self._waiting[index] = replace(waiting, host=host)
                return True
        return False

    def leave(self, request_id: str) -> Waiting | None:
        """Takes a request out wherever it stands; None when it is not here."""
        for index, waiting in enumerate(self._waiting):
            if waiting.request.request_id == request_id:
                return self._waiting.pop(index)
        return None
