"""The router's numbers under vLLM's names, so that boards made for vLLM show a cluster.

The names and labels are those of vLLM's documentation of its production metrics. A cluster is one
engine there, `engine="0"`: requests that run are those with a worker, and the use of the cache is
that of the fullest decode worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ferryman.schedule.request import FinishReason
from ferryman_router.request.context import RouterContext

_ENDS = {str(reason) for reason in FinishReason}


class VllmMetrics(Collector):
    """A collector over what the router counts anyway; it is read at a scrape alone."""

    def __init__(self, ctx: RouterContext, num_in_flight: Callable[[], int]) -> None:
        self._ctx, self._num_in_flight = ctx, num_in_flight

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def describe(self) -> Iterator[Metric]:
        """Yields nothing in advance."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        labels = {"model_name": self._ctx.model.model_id, "engine": "0"}
        metrics = self._ctx.metrics
        yield metrics.first_token.family("vllm:time_to_first_token_seconds", labels)
        yield metrics.gap.family("vllm:inter_token_latency_seconds", labels)
        yield metrics.gap.family("vllm:time_per_output_token_seconds", labels)
        yield metrics.request.family("vllm:e2e_request_latency_seconds", labels)
        yield metrics.queue_wait.family("vllm:request_queue_time_seconds", labels)
        yield from self._gauges(labels)
        yield from self._counters(labels)

    def _gauges(self, labels: Mapping[str, str]) -> Iterator[Metric]:
        num_waiting = len(self._ctx.dispatcher)
        decoding = self._ctx.fleet.usable("decode", time.monotonic())
        for name, value in {
            "vllm:num_requests_running": max(0, self._num_in_flight() - num_waiting),
            "vllm:num_requests_waiting": num_waiting,
            "vllm:kv_cache_usage_perc": max(
                (worker.beat.cache_usage for worker in decoding), default=0.0
            ),
        }.items():
            gauge = GaugeMetricFamily(name, "As vLLM has it.", labels=tuple(labels))
            gauge.add_metric(tuple(labels.values()), value)
            yield gauge

    def _counters(self, labels: Mapping[str, str]) -> Iterator[Metric]:
        metrics, prompt = self._ctx.metrics, _values(self._ctx.metrics.tokens, "kind")
        cached = sum(_values(metrics.cached_tokens, "tier").values())
        for name, value in {
            "vllm:prompt_tokens": prompt.get("prompt", 0.0),
            "vllm:generation_tokens": prompt.get("output", 0.0),
            "vllm:prefix_cache_queries": prompt.get("prompt", 0.0),
            "vllm:prefix_cache_hits": cached,
        }.items():
            counter = CounterMetricFamily(name, "As vLLM has it.", labels=tuple(labels))
            counter.add_metric(tuple(labels.values()), value)
            yield counter
        ended = CounterMetricFamily(
            "vllm:request_success", "As vLLM has it.", labels=(*labels, "finished_reason")
        )
        for outcome, number in _values(metrics.requests, "outcome").items():
            if outcome in _ENDS:
                ended.add_metric((*labels.values(), outcome), number)
        yield ended


def _values(counter: Collector, label: str) -> dict[str, float]:
    """The values of a counter by its only label."""
    return {
        sample.labels[label]: sample.value
        for family in counter.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    }
