"""The figures in `/metrics`. Per token only a bisection and two additions are spent on it."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import Counter
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ferryman.runtime.metrics import Metrics
from ferryman.wire.nats.bus import Bus
from ferryman.wire.nats.subjects import REFUSED_LOGINS
from ferryman.wire.values import Usage
from ferryman_router.request.attempt_result import uncached_tokens

FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
REQUEST_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
WAIT_SECONDS = (0.001, 0.01, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
GAP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
MAX_IGNORED_NAMES, OTHER_NAMES = 64, "others"
TICK_SECONDS, IDLE_TICK_SECONDS = 0.02, 0.64
IDLE_SHARE = 0.1  # of the time between two ticks; below it the process is idle


class Buckets(Collector):
    """A histogram for one event loop: no locks, and prometheus_client sees it when it asks."""

    def __init__(self, name: str, documentation: str, bounds: tuple[float, ...]) -> None:
        self._name, self._documentation, self._bounds = name, documentation, bounds
        self._counts, self._sum = [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterator[Metric]:
        yield self.family(self._name, {})

    def family(self, name: str, labels: Mapping[str, str]) -> HistogramMetricFamily:
        """The same histogram under a name and with labels."""
        total, buckets = 0, []
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((str(bound), float(total)))
        made = HistogramMetricFamily(name, self._documentation, labels=tuple(labels))
        made.add_metric(tuple(labels.values()), buckets, self._sum)
        return made


@dataclass(frozen=True, slots=True)
class RouterStatistics:
    """The gauges: `index_away` is 1 while Redis does not answer, `index_misses_away` counts lookups
    that were not answered so far, `index_forged` what strangers left in the index, `index_refused`
    all logins and commands that Redis refused since it started; requests that wait for a worker,
    the seconds until those will have been served, and requests under way."""

    index_away: bool
    index_misses_away: int
    index_forged: int
    index_refused: int
    queue_requests: int
    queue_seconds: float
    in_flight_requests: int


class RouterMetrics(Metrics):
    """Counters and histograms of one router, in a registry of its own. Gauges are `watch`ed."""

    def __init__(self) -> None:
        super().__init__("router")
        self.first_token = self._buckets(
            "first_token_seconds", "Arrival to first token.", FIRST_TOKEN_SECONDS
        )
        self.gap = self._buckets("token_gap_seconds", "Between tokens of one answer.", GAP_SECONDS)
        self.request = self._buckets(
            "request_seconds", "Arrival to the end of a whole answer.", REQUEST_SECONDS
        )
        self.queue_wait = self._buckets(
            "queue_wait_seconds", "Until an attempt had its workers.", WAIT_SECONDS
        )
        self.loop_held = self._buckets(
            "loop_held_seconds",
            "For how long the router's own work kept the event loop from its next.",
            GAP_SECONDS,
        )
        counter = self.counter
        self.requests = counter("requests", "Requests ended, by outcome.", ["outcome"])
        self.responses = counter("responses", "Responses begun.", ["door", "status"])
        self.tokens = counter("tokens", "Tokens, prompt or output.", ["kind"])
        self.cached_tokens = counter("cached_tokens", "Prompt tokens reused.", ["tier"])
        self.uncached_tokens = counter(
            "uncached_tokens", "Prompt tokens computed, and why.", ["reason"]
        )
        self.decode_cached_tokens = counter(
            "decode_cached_tokens", "Prompt tokens that decode had itself.", ["tier"]
        )
        self.draft_tokens = counter("draft_tokens", "Drafts verified.", ["outcome"])
        self.retries = counter("retries", "Attempts after the first, by cause.", ["cause"])
        self.prefetches = counter("prefetches", "Prefetches, by how they began.", ["outcome"])
        self.lost_workers = counter("lost_workers", "Workers lost.", ["role", "cause"])
        self.forged_messages = counter("forged_messages", "Beats and others in a false name.")
        self.misplaced_beats = counter("misplaced_beats", "Beats from where another life answers.")
        self.refused_bus_logins = counter("refused_bus_logins", "Logins that NATS refused.")
        self.refused_handshakes = counter("refused_handshakes", "Failed TLS handshakes of HTTPS.")
        self.refused_tokens = counter("refused_token_frames", "Frames not taken.", ["why"])
        self._ignored = counter("ignored_fields", "Fields of bodies without effect.", ["name"])
        self._ignored_names: set[str] = set()

    def _buckets(self, name: str, documentation: str, bounds: tuple[float, ...]) -> Buckets:
        made = Buckets(f"ferryman_router_{name}", documentation, bounds)
        self.registry.register(made)
        return made

    def count_ignored(self, name: str) -> None:
        """A field of a body that had no effect. Callers choose the names, so the first ones are
        counted by name, and all others together."""
        if len(self._ignored_names) < MAX_IGNORED_NAMES:
            self._ignored_names.add(name)
        self._ignored.labels(name if name in self._ignored_names else OTHER_NAMES).inc()

    def count_usage(self, usage: Usage, page_size: int) -> None:
        """The tokens of one finished request, and where its prompt's came from."""
        self.tokens.labels("prompt").inc(usage.prompt_tokens)
        self.tokens.labels("output").inc(usage.completion_tokens)
        self.draft_tokens.labels("accepted").inc(usage.accepted_tokens)
        self.draft_tokens.labels("rejected").inc(usage.drafted_tokens - usage.accepted_tokens)
        for tier, tokens in usage.cached.by_tier.items():
            self.cached_tokens.labels(tier).inc(tokens)
        for tier, tokens in usage.at_decode.by_tier.items():
            self.decode_cached_tokens.labels(tier).inc(tokens)
        for reason, tokens in uncached_tokens(usage, page_size).items():
            self.uncached_tokens.labels(reason).inc(tokens)


async def count_refused_logins(bus: Bus, refused: Counter) -> None:
    """Counts all logins that the broker refuses, until it is cancelled.

    A broker with a users file of an older version does not send these events to routers.
    """
    async with bus.subscribed(REFUSED_LOGINS) as events:
        async for _ in events:
            refused.inc()


async def watch_loop(observe: Callable[[float], None]) -> None:
    """Measures, a few dozen times a second while there is work, until it is cancelled.

    It counts the lateness of a tick, but no more than the CPU time that this process used
    meanwhile: a machine that runs others instead does not hold up the loop. Ticks grow longer while
    the process hardly works: they were most of what an idle router did.
    """
    clock, tick = asyncio.get_running_loop().time, TICK_SECONDS
    while True:
        begun, worked = clock(), time.process_time()
        await asyncio.sleep(tick)
        late, used = clock() - begun - tick, time.process_time() - worked
        observe(max(0.0, min(late, used)))
        is_idle = used < tick * IDLE_SHARE
        tick = min(2 * tick, IDLE_TICK_SECONDS) if is_idle else TICK_SECONDS
