"""Reuse counters of a worker: reused tokens by tier and kind, pages computed anew by reason; and
the time that state takes to the next worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.node import TreeChange
from ferryman.cache.resume import CopyState, ResumePlan
from ferryman.cache.slots import Ledger
from ferryman.cache.units import HostUnit
from ferryman.runtime.metrics import Metrics
from ferryman.tiers.prefetch_values import Prefetched
from ferryman.worker.summary import cached_tokens, tier_of

HANDOFF_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


class CacheMetrics:
    """Counters of one worker. A prompt counts by the plan that computed it."""

    def __init__(self, manifest: StateManifest, metrics: Metrics) -> None:
        self._manifest = manifest
        counter = metrics.counter
        self._plans = counter(
            "plans_total", "plans by the slowest tier that they draw on", ["tier"]
        )
        self._cached = counter("cached_tokens_total", "tokens reused, by tier", ["tier"])
        self._uncached = counter("uncached_tokens_total", "tokens computed, by reason", ["reason"])
        self._reused = counter("reused_units_total", "units reused on the device", ["kind"])
        self._evicted = counter("evicted_units_total", "units that left the device", ["kind"])
        self._units = counter("loaded_units_total", "units loaded, by origin", ["tier", "kind"])
        self._bytes = counter("loaded_bytes_total", "bytes loaded, by origin", ["tier", "kind"])
        self._prefetches = counter("prefetches_total", "prefetches, by what came", ["outcome"])
        self._truncated = counter(
            "prefetch_truncations_total", "prefetches cut short, by reason", ["reason"]
        )
        self._lacking = counter(
            "prefetch_lacking_tokens_total", "tokens slower tiers hold, not brought", ["reason"]
        )
        self._handoffs = metrics.histogram(
            "handoff_seconds", "from the call of decode to its commit", HANDOFF_SECONDS
        )
        self._brought = counter("prefetched_bytes_total", "bytes brought to the host", ["tier"])

    def planned(self, plan: ResumePlan) -> None:
        """Counts the plan of a prompt that was computed or came back from retraction; not of a
        hand-off."""
        self._plans.labels(tier_of(plan)).inc()
        for tier, tokens in cached_tokens(self._manifest, plan).by_tier.items():
            self._cached.labels(tier).inc(tokens)
        self._reused.labels(str(Kind.FULL)).inc(plan.anchor_pages)
        self._reused.labels(str(Kind.WINDOW)).inc(len(plan.window_pages))
        self._reused.labels(str(Kind.RECURRENT)).inc(isinstance(plan.initialiser, CopyState))
        page_size = self._manifest.page_size
        for span in plan.uncached:
            end = min(span.end_page * page_size, plan.prompt_len)
            self._uncached.labels(str(span.reason)).inc(end - span.first_page * page_size)
        self.loaded(plan.loads)

    def handed_off(self, seconds: float) -> None:
        """A hand-off was committed, so long after decode was called for it."""
        self._handoffs.observe(seconds)

    def loaded(self, loads: Iterable[HostUnit]) -> None:
        """Counts units that came from a slower tier."""
        for unit in loads:
            labels = str(unit.origin), str(unit.kind)
            self._units.labels(*labels).inc()
            self._bytes.labels(*labels).inc(unit.num_bytes)

    def changed(self, changes: Iterable[TreeChange]) -> None:
        """Counts the units that left the device tier."""
        for change in changes:
            if not change.is_stored:
                self._evicted.labels(str(change.kind)).inc(len(change.keys))

    def prefetched(self, brought: Prefetched) -> None:
        """Counts a prefetch once its wait is over."""
        gained = brought.brought_pages > brought.before_pages
        wanted = brought.asked_pages > brought.before_pages
        self._prefetches.labels("brought" if gained else "missed" if wanted else "nothing").inc()
        if brought.is_truncated:
            self._truncated.labels(brought.reason).inc()
        if brought.reason:
            pages = max(0, brought.asked_pages - brought.brought_pages)
            self._lacking.labels(brought.reason).inc(pages * self._manifest.page_size)
        for tier, traffic in brought.traffic.items():
            self._brought.labels(str(tier)).inc(traffic.num_bytes)


TREE = "tree"  # the role of slots that only the prefix cache holds


def usage_of(ledger: Ledger | None) -> float:
    """The share of a pool that requests hold, from 0 to 1; what only the cache holds can be
    evicted, and does not count."""
    if ledger is None or not ledger.total:
        return 0.0
    return _in_use(ledger) / ledger.total


def _in_use(ledger: Ledger) -> int:
    # A slot that several requests share counts for each of them.
    held = sum(number for role, number in ledger.by_role.items() if role != TREE)
    return min(held, ledger.leased)


class SlotGauges(Collector):
    """`<prefix>slots{kind,state}` with the states `free`, `cached` and `used`, and
    `<prefix>cache_usage{kind}`, the share that requests hold."""

    def __init__(self, prefix: str, ledgers: Callable[[], Mapping[Kind, Ledger]]) -> None:
        self._prefix, self._ledgers = prefix, ledgers

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Yields nothing in advance: the pools are read at a scrape only."""
        return iter(())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        slots = GaugeMetricFamily(
            f"{self._prefix}slots", "Slots of the device now.", labels=("kind", "state")
        )
        usage = GaugeMetricFamily(
            f"{self._prefix}cache_usage", "Share that requests hold now.", labels=("kind",)
        )
        for kind, ledger in self._ledgers().items():
            used = _in_use(ledger)
            slots.add_metric((str(kind), "free"), ledger.free)
            slots.add_metric((str(kind), "cached"), ledger.leased - used)
            slots.add_metric((str(kind), "used"), used)
            usage.add_metric((str(kind),), usage_of(ledger))
        yield slots
        yield usage
