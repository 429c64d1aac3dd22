"""Metrics of one process, in a registry of its own: two services in one test do not meet.

Names are `ferryman_<role>_<what>_<unit>`. Whatever offers `statistics()`, a frozen dataclass of
numbers, becomes gauges that are read when somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

CONTENT_TYPE = CONTENT_TYPE_LATEST

# From a decode step to a long prompt's prefill on a small machine.
LATENCY_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)


class Metrics:
    """Makes and renders the metrics of the process with this role."""

    def __init__(self, role: str) -> None:
        self._prefix = f"ferryman_{role}_"
        self._registry = CollectorRegistry()

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(self._prefix + name, text, labels, registry=self._registry)

    def gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(self._prefix + name, text, labels, registry=self._registry)

    def histogram(
        self,
        name: str,
        text: str,
        labels: Sequence[str] = (),
        *,
        buckets: Sequence[float] = LATENCY_SECONDS,
    ) -> Histogram:
        return Histogram(
            self._prefix + name, text, labels, buckets=buckets, registry=self._registry
        )

    def watch(self, name: str, statistics: Callable[[], DataclassInstance]) -> None:
        """Gauges `<name>_<field>` for every field, read at each scrape."""
        self._registry.register(_Watched(self._prefix + name, statistics))

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._registry)


class _Watched:
    """A collector in prometheus-client's sense."""

    def __init__(self, prefix: str, statistics: Callable[[], DataclassInstance]) -> None:
        self._prefix = prefix
        self._statistics = statistics

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Nothing in advance: `statistics` is only called when somebody scrapes."""
        return iter(())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        now = self._statistics()
        for field in fields(now):
            name = f"{self._prefix}_{field.name.removeprefix('num_')}"
            yield GaugeMetricFamily(name, f"{field.name} now", value=getattr(now, field.name))
