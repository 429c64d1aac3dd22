"""Metrics of one process, in its own registry, so that two services in one test do not collide.

Names are `ferryman_<role>_<what>_<unit>`. A `statistics()` function that returns a frozen dataclass
of numbers becomes gauges, which are read at each scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

CONTENT_TYPE = CONTENT_TYPE_LATEST


class Metrics:
    """Makes and renders the metrics of the process with this role."""

    def __init__(self, role: str) -> None:
        self.prefix = f"ferryman_{role}_"
        self.registry = CollectorRegistry()

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(self.prefix + name, text, labels, registry=self.registry)

    def histogram(self, name: str, text: str, bounds: Sequence[float]) -> Histogram:
        return Histogram(self.prefix + name, text, buckets=bounds, registry=self.registry)

    def watch(self, name: str, statistics: Callable[[], DataclassInstance]) -> None:
        """Gauges `<name>_<field>`, or `<field>` without a name, for every field that is a number,
        read at each scrape."""
        self.registry.register(_Watched(self.prefix + (name and f"{name}_"), statistics))

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)


def refused_calls(metrics: Metrics) -> Callable[[str, str], None]:
    """A count of gRPC calls that were refused, by method and reason."""
    counter = metrics.counter("refused_calls", "gRPC calls refused", ["method", "reason"])
    return lambda method, reason: counter.labels(method, reason).inc()


class _Watched:
    """A collector in prometheus-client's sense."""

    def __init__(self, prefix: str, statistics: Callable[[], DataclassInstance]) -> None:
        self._prefix = prefix
        self._statistics = statistics

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Yields nothing in advance: `statistics` is called at a scrape only."""
        return iter(())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        now = self._statistics()
        for field in fields(now):
            value = getattr(now, field.name)
            if isinstance(value, int | float):
                name = self._prefix + field.name.removeprefix("num_")
                yield GaugeMetricFamily(name, f"{field.name} now", value=value)
