"""Spans arrive at a collector by both of OTLP's protocols as they were made."""

from __future__ import annotations

import sys

import pytest
from tests.span_collector import ERROR, SERVER, SeenSpan, SpanCollector, span_collector

from ferryman.errors import ConfigError
from ferryman.runtime.spans.otlp import Collector, check_installed, otlp_sender
from ferryman.runtime.spans.span import Span, SpanEvent, WorkKind
from ferryman.runtime.traces import TraceContext

SPAN = Span(
    TraceContext("0" * 31 + "7", "b" * 16, True),
    "c" * 16,
    "prefill",
    WorkKind.SERVER,
    1_000,
    9_000,
    {"ferryman.position": 16, "gen_ai.response.finish_reasons": ["stop"]},
    (SpanEvent("chunk", 2_000, {"ferryman.end": 32}),),
    error="Cancelled",
)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_span_arrives_as_it_was_made(protocol: str) -> None:
    with span_collector() as collector:
        url = {"grpc": collector.grpc, "http": collector.http}[protocol]
        assert otlp_sender(Collector.at(url), {"service.name": "ferryman-prefill"})([SPAN])
        assert collector.spans == [
            SeenSpan(
                "ferryman-prefill",
                "0" * 31 + "7",
                "b" * 16,
                "c" * 16,
                "prefill",
                SERVER,
                1_000,
                9_000,
                ERROR,
                {
                    "ferryman.position": 16,
                    "gen_ai.response.finish_reasons": ["stop"],
                    "error.type": "Cancelled",
                },
            )
        ]


def test_a_collector_that_is_gone_takes_nothing() -> None:
    with span_collector() as collector:
        gone = SpanCollector(collector.grpc, collector.http)
    # A refused connection is tried again for a while by the exporter; HTTP's gives up by the limit.
    assert not otlp_sender(Collector.at(gone.http), {"service.name": "ferryman-prefill"})([SPAN])


@pytest.mark.parametrize("endpoint", ["collector:4317", "tcp://collector:4317", "http://"])
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="should be http://HOST:4318 or grpc://HOST:4317"):
        Collector.at(endpoint)


def test_a_share_of_the_traces_may_be_enough() -> None:
    assert Collector.at("http://collector:4318").share == 1.0
    collector = Collector.at("grpc://collector:4317?share=0.25")
    assert (collector.share, collector.url.netloc) == (0.25, "collector:4317")


@pytest.mark.parametrize("options", ["share=2", "share=half", "part=0.5"])
def test_another_option_of_the_address_is_refused(options: str) -> None:
    with pytest.raises(ConfigError, match="takes share=0 to share=1"):
        Collector.at(f"http://collector:4318?{options}")


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc", None)
    with pytest.raises(ConfigError, match=r"pip install 'ferryman\[otel\]'"):
        check_installed()
