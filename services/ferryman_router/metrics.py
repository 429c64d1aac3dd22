"""What `/metrics` shows. Per token only a bisection and two additions are spent on it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ferryman.wire.values import Usage
from ferryman_router.usage import uncached_tokens

FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
GAP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Buckets(Collector):
    """A histogram for one event loop: no locks, and prometheus_client sees it when it asks."""

    def __init__(self, name: str, documentation: str, bounds: tuple[float, ...]) -> None:
        self._name, self._documentation, self._bounds = name, documentation, bounds
        self._counts, self._sum = [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterator[Metric]:
        total, buckets = 0, []
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((str(bound), float(total)))
        yield HistogramMetricFamily(
            self._name, self._documentation, buckets=buckets, sum_value=self._sum
        )


class RouterMetrics:
    """All figures of one router, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.first_token = Buckets(
            "ferryman_router_first_token_seconds", "Arrival to first token.", FIRST_TOKEN_SECONDS
        )
        self.gap = Buckets(
            "ferryman_router_token_gap_seconds", "Between tokens of one answer.", GAP_SECONDS
        )
        self._registry.register(self.first_token)
        self._registry.register(self.gap)
        self.requests = self._counter("requests", "Requests ended, by outcome.", "outcome")
        self.responses = self._counter("responses", "Responses begun.", "door", "status")
        self.tokens = self._counter("tokens", "Tokens, prompt or output.", "kind")
        self.cached_tokens = self._counter("cached_tokens", "Prompt tokens reused.", "tier")
        self.uncached_tokens = self._counter(
            "uncached_tokens", "Prompt tokens computed, and why.", "reason"
        )
        self.draft_tokens = self._counter("draft_tokens", "Drafts verified.", "outcome")
        self.retries = self._counter("retries", "Attempts after the first, by cause.", "cause")
        self.prefetches = self._counter("prefetches", "Prefetches, by how they began.", "outcome")
        self.lost_workers = self._counter("lost_workers", "Workers lost.", "role", "cause")
        self.refused_tokens = self._counter("refused_token_frames", "Frames not taken.", "why")

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(f"ferryman_router_{name}", documentation, labels, registry=self._registry)

    def count_usage(self, usage: Usage, page_size: int) -> None:
        """The tokens of one finished request, and where its prompt's came from."""
        self.tokens.labels("prompt").inc(usage.prompt_tokens)
        self.tokens.labels("output").inc(usage.completion_tokens)
        self.draft_tokens.labels("accepted").inc(usage.accepted_tokens)
        self.draft_tokens.labels("rejected").inc(usage.drafted_tokens - usage.accepted_tokens)
        for tier, tokens in usage.cached.by_tier.items():
            self.cached_tokens.labels(tier).inc(tokens)
        for reason, tokens in uncached_tokens(usage, page_size).items():
            self.uncached_tokens.labels(reason).inc(tokens)

    def watch(self, name: str, documentation: str, read: Callable[[], float]) -> None:
        """A gauge that is read when somebody looks."""
        gauge = Gauge(f"ferryman_router_{name}", documentation, registry=self._registry)
        gauge.set_function(read)

    def text(self) -> bytes:
        return generate_latest(self._registry)
