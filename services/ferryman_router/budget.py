"""How often the router may try again: bounded per request, and over all requests. Pure."""

from __future__ import annotations

from dataclasses import dataclass

MAX_ATTEMPTS = 3
MAX_DEATHS = 2


class RetryBudget:
    """At most `share` of the requests in flight may be second or third tries, but a few always."""

    def __init__(self, share: float = 0.1, floor: int = 4) -> None:
        self._share, self._floor = share, floor
        self._retrying: set[str] = set()

    def __len__(self) -> int:
        return len(self._retrying)

    def try_take(self, request_id: str, num_in_flight: int) -> bool:
        """Whether this request may be tried again; a request counts once until it ends."""
        if request_id in self._retrying:
            return True
        if len(self._retrying) >= max(self._floor, int(num_in_flight * self._share)):
            return False
        self._retrying.add(request_id)
        return True

    def give_back(self, request_id: str) -> None:
        self._retrying.discard(request_id)


@dataclass(slots=True)
class Tries:
    """What one request has been through. Being refused for lack of room is not a try."""

    num_failed: int = 0
    num_deaths: int = 0

    def failed(self, *, by_death: bool) -> None:
        self.num_failed += 1
        self.num_deaths += by_death

    @property
    def is_suspect(self) -> bool:
        """It was running when two workers died; a third shall not be put at risk."""
        return self.num_deaths >= MAX_DEATHS

    @property
    def may_go_on(self) -> bool:
        return self.num_failed < MAX_ATTEMPTS and not self.is_suspect
