"""How many strikes each request has had to bear. Pure.

A request whose workers of one role died twice at one place, or three times in all, is suspected of
killing them, and is refused (0122, 0162). So that no request is, chance must not do what only a
suspect does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ferryman.handoff.lifecycle import DECODE, ROUTER, LifecycleEntry

MAX_STRIKES = 2
# The last words of one that ended may be lost, with its router or with the broker.
SILENT_MS = 4000


@dataclass(slots=True)
class Burden:
    """One request: the ids of the processes that have it, and what has been done to them."""

    ids: frozenset[str]
    heard_at: int = 0
    num_strikes: int = 0
    has_gone_on: bool = True

    def struck(self) -> None:
        self.num_strikes += 1
        self.has_gone_on = False


@dataclass(slots=True)
class Endurance:
    """All requests under way, as the events say. `names` are the processes by their ids, of which
    some are heard of later than requests that they have."""

    names: Mapping[str, str]
    burdens: dict[str, Burden] = field(default_factory=dict)
    _away: set[str] = field(default_factory=set)

    def saw(self, event: LifecycleEntry) -> None:
        burden = self.burdens.get(event.request_id)
        if event.role == ROUTER and event.name == "routed":
            ids = (event.worker_id, str(event.facts["prefill"]), str(event.facts["decode"]))
            burden = self.burdens.setdefault(event.request_id, Burden(frozenset()))
            burden.ids = frozenset(ids)
            if not self._away.isdisjoint(self.names.get(one, "") for one in ids):
                burden.struck()
        elif event.role == ROUTER and event.name not in ("received", "taken_over", "migrated"):
            self.burdens.pop(event.request_id, None)
        elif burden and event.role == DECODE and event.name == "progress":
            # Of its first token alone no router may have heard when the worker dies.
            burden.has_gone_on = True
        if burden:
            burden.heard_at = max(burden.heard_at, event.unix_ms)

    def may_strike(self, name: str, unix_ms: float) -> bool:
        """Whether each request there can bear it: it was spared before, or has had tokens since."""
        return all(
            burden.num_strikes < MAX_STRIKES and burden.has_gone_on
            for burden in self._of(name)
            if burden.heard_at > unix_ms - SILENT_MS
        )

    def struck(self, name: str) -> None:
        """From now on until it is `back`."""
        self._away.add(name)
        for burden in self._of(name):
            burden.struck()

    def back(self, name: str) -> None:
        self._away.discard(name)

    def _of(self, name: str) -> list[Burden]:
        return [
            burden
            for burden in self.burdens.values()
            if any(self.names.get(one) == name for one in burden.ids)
        ]
