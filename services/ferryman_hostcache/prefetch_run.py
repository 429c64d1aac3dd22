"""One prefetch as those who wait for it see it: what was granted and brought, and its end."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from ferryman.cache.units import Tier
from ferryman.tiers.prefetch import Grant
from ferryman.tiers.prefetch_values import Lack, PrefetchAsk, Prefetched, Traffic
from ferryman.wire.rpc import CallTags


class Run:
    """One prefetch. `stop` ends it early; after `settled` its result stands.

    It outlives its work, so it keeps nothing that grows with the prompt.
    """

    def __init__(
        self, tags: CallTags, ask: PrefetchAsk, num_tokens: int, *, before: int, began: float
    ) -> None:
        self.tags, self.num_tokens, self.began = tags, num_tokens, began
        self._have, self._last_key = ask.have_pages, tuple(ask.keys[-1:])
        self.grant = Grant(before, before, before, None, ())
        self.brought, self.bytes_under_way = before, 0
        self.has_failed = False
        self.traffic: dict[Tier, Traffic] = {}
        self.stop, self.settled = asyncio.Event(), asyncio.Event()

    def serves(self, ask: PrefetchAsk) -> bool:
        """Whether it brings what is asked. Keys chain: chains with one end are one chain."""
        return self._last_key == tuple(ask.keys[-1:]) and self._have <= ask.have_pages

    def granted(self, grant: Grant) -> None:
        """Room was reserved, or none."""
        self.grant, self.bytes_under_way = replace(grant, room=()), grant.num_bytes

    def result(self) -> Prefetched:
        grant = self.grant
        return Prefetched(
            before_pages=grant.before,
            asked_pages=grant.asked,
            granted_pages=grant.granted,
            brought_pages=self.brought,
            is_truncated=grant.before < grant.granted < grant.asked,
            reason=self._lack(),
            traffic=dict(self.traffic),
        )

    def _lack(self) -> str:
        """What came short last: the room, or after it the bringing."""
        if self.brought >= self.grant.asked:
            return ""
        if self.brought < self.grant.granted:
            return Lack.TIER_FAILED if self.has_failed else Lack.STORAGE_TIMEOUT
        return self.grant.lack or ""
