"""What came of all prefetches since the start, and how fast each tier was of late."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ferryman.cache.manifest import Kind
from ferryman.cache.units import Tier
from ferryman.tiers.prefetch_values import Traffic
from ferryman_hostcache.bringing import Bringing
from ferryman_hostcache.prefetch_run import Run

# What is left of the past in a tier's bandwidth after each prefetch: the last ten or so count.
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
    num_lost: int = 0
    bytes_under_way: int = 0


class PrefetchTally:
    """Sums, by tier where they come from one."""

    def __init__(self) -> None:
        self.num_begun = self.num_lost = 0
        self.traffic: dict[Tier, Traffic] = {}
        self.brought_units, self.lacking_units = Counter[tuple[Tier, Kind]](), Counter[Kind]()
        self._complete = self._truncated = self._fruitless = 0
        self._failed_reads = self._corrupt = self._mismatched = 0
        self._recent: dict[Tier, tuple[float, float]] = {}  # bytes and seconds, decaying

    def add(self, run: Run, bringing: Bringing) -> None:
        """A prefetch has settled."""
        result = run.result()
        self._truncated += result.is_truncated
        self._complete += result.before_pages < result.asked_pages <= result.brought_pages
        self._fruitless += result.brought_pages <= result.before_pages < result.asked_pages
        self._failed_reads += bringing.num_failed
        self._corrupt += bringing.num_corrupt
        self._mismatched += bringing.num_mismatched
        self.lacking_units.update(run.grant.lacking)
        self.brought_units.update((tier, name[0]) for name, tier in bringing.origins.items())
        for tier, each in bringing.traffic.items():
            self.traffic[tier] = self.traffic.get(tier, Traffic()) + each
            num_bytes, seconds = self._recent.get(tier, (0.0, 0.0))
            self._recent[tier] = KEPT * num_bytes + each.num_bytes, KEPT * seconds + each.seconds

    def seconds_per_byte(self, tier: Tier) -> float:
        """Learned from what came from a tier of late; 0 before anything did."""
        num_bytes, seconds = self._recent.get(tier, (0.0, 0.0))
        return seconds / num_bytes if num_bytes else 0.0

    def counts(self, num_running: int, bytes_under_way: int) -> PrefetchCounts:
        """With what is under way now, which others know."""
        return PrefetchCounts(
            num_running=num_running,
            num_begun=self.num_begun,
            num_complete=self._complete,
            num_truncated=self._truncated,
            num_fruitless=self._fruitless,
            num_failed_reads=self._failed_reads,
            num_corrupt=self._corrupt,
            num_mismatched=self._mismatched,
            num_lost=self.num_lost,
            bytes_under_way=bytes_under_way,
        )
