"""How full a worker's pools are, as Prometheus reads it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from ferryman.cache.manifest import Kind
from ferryman.cache.slots import Ledger
from ferryman.worker.cache_metrics import SlotGauges, usage_of


def test_what_only_the_cache_holds_is_cached_and_not_used() -> None:
    ledger = Ledger(total=100, free=40, leased=60, by_role={"tree": 50, "running": 25})
    registry = CollectorRegistry()
    registry.register(SlotGauges("ferryman_decode_", lambda: {Kind.FULL: ledger}))

    def slots(state: str) -> float | None:
        return registry.get_sample_value("ferryman_decode_slots", {"kind": "full", "state": state})

    assert (slots("free"), slots("cached"), slots("used")) == (40, 35, 25)
    assert registry.get_sample_value("ferryman_decode_cache_usage", {"kind": "full"}) == 0.25


def test_a_page_that_many_requests_share_is_used_once() -> None:
    ledger = Ledger(total=10, free=8, leased=2, by_role={"running": 6})
    assert usage_of(ledger) == 0.2


def test_a_model_without_pages_uses_none() -> None:
    assert usage_of(None) == 0.0
