"""Which tier a prefetch brought units from, for the attempt that it was made for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from ferryman.cache.units import Tier
from ferryman.tiers.write_policy import UnitKey
from ferryman.wire.rpc import CallTags

MAX_UNITS = 65_536
NOTHING: Mapping[UnitKey, Tier] = {}


class Origins:
    """Remembers the newest prefetches, of at most `max_units` units together and one at least."""

    def __init__(self, max_units: int = MAX_UNITS) -> None:
        self.max_units = max_units
        self._by_attempt: OrderedDict[tuple[str, int], Mapping[UnitKey, Tier]] = OrderedDict()
        self._num_units = 0

    def remember(self, tags: CallTags, units: Mapping[UnitKey, Tier]) -> None:
        """Without a request id nobody could ask for them."""
        if not tags.request_id or not units:
            return
        name = tags.request_id, tags.attempt
        self._num_units += len(units) - len(self._by_attempt.pop(name, NOTHING))
        self._by_attempt[name] = units
        while self._num_units > self.max_units and len(self._by_attempt) > 1:
            _, forgotten = self._by_attempt.popitem(last=False)
            self._num_units -= len(forgotten)

    def of(self, tags: CallTags) -> Mapping[UnitKey, Tier]:
        """By unit; what is not in it was in the host tier."""
        return self._by_attempt.get((tags.request_id, tags.attempt), NOTHING)
