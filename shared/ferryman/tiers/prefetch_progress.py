"""One prefetch from its start to its result, and the tiers that its units came from.

The host-cache, which copies bytes, and the simulator, which counts seconds, use the same records.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace

from ferryman.cache.units import Tier
from ferryman.tiers.prefetch import PrefetchGrant
from ferryman.tiers.prefetch_values import Prefetched, PrefetchRequest, PrefetchShortfall, Traffic
from ferryman.tiers.values import AcquireGrant
from ferryman.tiers.write_policy import UnitKey

MAX_UNITS = 65_536
NOTHING: Mapping[UnitKey, Tier] = {}

# A request's id and the number of its attempt.
AttemptName = tuple[str, int]


class PrefetchProgress:
    """The grant of a prefetch and its progress.

    It lives longer than the transfer, so its size does not depend on the prompt.
    """

    def __init__(self, ask: PrefetchRequest, before: int) -> None:
        self._have, self._last_key = ask.have_pages, tuple(ask.keys[-1:])
        self.grant = PrefetchGrant(before, before, before, None, ())
        self.brought, self.bytes_under_way = before, 0
        self.has_failed = False
        self.traffic: dict[Tier, Traffic] = {}

    def serves(self, ask: PrefetchRequest) -> bool:
        """Whether this prefetch covers `ask`. Keys are chained: equal last keys, equal chains."""
        return self._last_key == tuple(ask.keys[-1:]) and self._have <= ask.have_pages

    def on_grant(self, grant: PrefetchGrant) -> None:
        """Records the grant, which may hold no room."""
        self.grant, self.bytes_under_way = replace(grant, room=()), grant.num_bytes

    def result(self) -> Prefetched:
        grant = self.grant
        return Prefetched(
            before_pages=grant.before,
            asked_pages=grant.asked,
            granted_pages=grant.granted,
            brought_pages=self.brought,
            is_truncated=grant.before < grant.granted < grant.asked,
            reason=self._shortfall(),
            traffic=dict(self.traffic),
        )

    def _shortfall(self) -> str:
        """The last thing that was short: room, or else reading."""
        if self.brought >= self.grant.asked:
            return ""
        if self.brought < self.grant.granted:
            failed, slow = PrefetchShortfall.TIER_FAILED, PrefetchShortfall.STORAGE_TIMEOUT
            return failed if self.has_failed else slow
        return self.grant.lack or ""


class PrefetchOrigins:
    """Remembers the newest prefetches: at most `max_units` units together, but at least one
    prefetch."""

    def __init__(self, max_units: int = MAX_UNITS) -> None:
        self.max_units = max_units
        self._by_attempt: OrderedDict[AttemptName, Mapping[UnitKey, Tier]] = OrderedDict()
        self._num_units = 0

    def remember(self, attempt: AttemptName, units: Mapping[UnitKey, Tier]) -> None:
        """Records the units that a prefetch for this attempt has brought. An attempt without a
        request id could not ask for them later."""
        request_id, _ = attempt
        if not request_id or not units:
            return
        self._num_units += len(units) - len(self._by_attempt.pop(attempt, NOTHING))
        self._by_attempt[attempt] = units
        while self._num_units > self.max_units and len(self._by_attempt) > 1:
            _, forgotten = self._by_attempt.popitem(last=False)
            self._num_units -= len(forgotten)

    def of(self, attempt: AttemptName) -> Mapping[UnitKey, Tier]:
        """The origin of each unit; units not in it were in the host tier."""
        return self._by_attempt.get(attempt, NOTHING)

    def label(self, grant: AcquireGrant, attempt: AttemptName) -> AcquireGrant:
        """The grant with origins: a unit that this attempt's prefetch brought has the tier it came
        from; every other unit has the host."""
        brought = self.of(attempt)
        if not brought:
            return grant
        units = (
            replace(unit, origin=brought.get((unit.kind, unit.key), Tier.HOST))
            for unit in grant.units
        )
        return replace(grant, units=tuple(units))
