"""Totals of a host-cache's prefetches: counts, traffic by tier, and measured bandwidth."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ferryman.cache.manifest import Kind
from ferryman.cache.units import Tier
from ferryman.tiers.prefetch_progress import PrefetchProgress
from ferryman.tiers.prefetch_values import Traffic
from ferryman_hostcache.prefetch_io import PrefetchIO

# The weight of the past in a tier's bandwidth after each prefetch: about the last ten count.
KEPT = 0.9


@dataclass(frozen=True, slots=True)
class PrefetchCounts:
    """Counts since the start. Bytes and seconds are of units that were verified."""

    num_running: int = 0
    num_begun: int = 0
    num_complete: int = 0
    num_truncated: int = 0
    num_fruitless: int = 0
    num_failed_reads: int = 0
    num_corrupt: int = 0
    num_mismatched: int = 0
    num_forged: int = 0
    num_lost: int = 0
    bytes_under_way: int = 0


class PrefetchStats:
    """Sums over prefetches, by tier or kind where they have one."""

    def __init__(self) -> None:
        self.num_begun = self.num_lost = 0
        self.traffic: dict[Tier, Traffic] = {}
        self.brought_units, self.lacking_units = Counter[tuple[Tier, Kind]](), Counter[Kind]()
        self._counts = Counter[str]()  # by the names of PrefetchCounts
        self._recent: dict[Tier, tuple[float, float]] = {}  # bytes and seconds, decaying

    def add(self, progress: PrefetchProgress, io: PrefetchIO) -> None:
        """Adds a prefetch that has settled."""
        result = progress.result()
        before, asked, brought = result.before_pages, result.asked_pages, result.brought_pages
        self._counts.update(
            num_truncated=int(result.is_truncated),
            num_complete=int(before < asked <= brought),
            num_fruitless=int(brought <= before < asked),
            num_failed_reads=io.num_failed,
            num_corrupt=io.num_corrupt,
            num_mismatched=io.num_mismatched,
            num_forged=io.num_forged,
        )
        self.lacking_units.update(progress.grant.lacking)
        self.brought_units.update((origin.tier, name[0]) for name, origin in io.origins.items())
        for tier, moved in io.traffic.items():
            self.traffic[tier] = self.traffic.get(tier, Traffic()) + moved
            num_bytes, seconds = self._recent.get(tier, (0.0, 0.0))
            self._recent[tier] = KEPT * num_bytes + moved.num_bytes, KEPT * seconds + moved.seconds

    def seconds_per_byte(self, tier: Tier) -> float:
        """The cost of a byte in the last transfers from a tier; 0 before the first."""
        num_bytes, seconds = self._recent.get(tier, (0.0, 0.0))
        return seconds / num_bytes if num_bytes else 0.0

    def counts(self, num_running: int, bytes_under_way: int) -> PrefetchCounts:
        """The counts, with those of running prefetches, which the caller knows."""
        return PrefetchCounts(
            num_running=num_running,
            num_begun=self.num_begun,
            num_lost=self.num_lost,
            bytes_under_way=bytes_under_way,
            **self._counts,
        )
