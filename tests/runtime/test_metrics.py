"""Metrics belong to one process object, and are served over a real port."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import httpx
import pytest

from ferryman.errors import ConfigError
from ferryman.runtime.access import MetricsAccess, MetricsGuard
from ferryman.runtime.http_server import HttpAnswer, json_answer, listening, observed
from ferryman.runtime.metrics import CONTENT_TYPE, Metrics
from ferryman.settings.groups import ListenSettings

NOTHING = observed({}, {}, lambda _path, _authorizations: None)


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    num_free: int
    used_bytes: int


def test_names_carry_the_role_and_two_registries_do_not_meet() -> None:
    one, other = Metrics("router"), Metrics("router")
    one.counter("requests_total", "requests", ["status"]).labels("ok").inc(3)
    other.counter("requests_total", "requests", ["status"])
    assert b'ferryman_router_requests_total{status="ok"} 3.0' in one.render()
    assert b"3.0" not in other.render()


def test_statistics_are_read_when_somebody_asks() -> None:
    metrics, free = Metrics("decode"), [5]
    metrics.watch("pool", lambda: PoolStatistics(free[0], 64))
    assert b"ferryman_decode_pool_free 5.0" in metrics.render()
    free[0] = 4
    assert b"ferryman_decode_pool_free 4.0" in metrics.render()
    assert b"ferryman_decode_pool_used_bytes 64.0" in metrics.render()


async def test_a_worker_shows_its_metrics_health_and_ledger() -> None:
    metrics = Metrics("prefill")
    metrics.counter("queue_requests", "waiting").inc(2)
    app = observed(
        {"/health": lambda: json_answer({"status": "draining"}, 503)},
        {
            "/metrics": lambda: HttpAnswer(metrics.render(), CONTENT_TYPE),
            "/debug/ledger": lambda: json_answer({"full": {"free": 1}}),
        },
        MetricsGuard(MetricsAccess(None), metrics).check,
    )
    async with listening(app, ListenSettings()) as port, httpx.AsyncClient() as client:
        root = f"http://127.0.0.1:{port}"
        scraped = await client.get(root + "/metrics")
        assert "ferryman_prefill_queue_requests_total 2.0" in scraped.text
        assert scraped.headers["content-type"] == CONTENT_TYPE
        assert (await client.get(root + "/health")).status_code == 503
        assert (await client.get(root + "/debug/ledger")).json() == {"full": {"free": 1}}
        assert (await client.get(root + "/none")).status_code == 404


async def test_a_busy_port_is_a_mistake_of_the_setup() -> None:
    async with listening(NOTHING, ListenSettings()) as port:
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address alr"):
            async with listening(NOTHING, ListenSettings(port=port)):
                pass


async def test_the_port_is_free_again_behind_the_block() -> None:
    async with listening(NOTHING, ListenSettings()) as port:
        pass
    async with listening(NOTHING, ListenSettings(port=port)) as again:
        assert again == port


async def test_an_error_of_the_body_leaves_and_the_server_ends() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with listening(NOTHING, ListenSettings()):
            raise ZeroDivisionError
    assert isinstance(caught.value.exceptions[0], ZeroDivisionError)


async def test_a_server_ends_without_waiting_for_a_look() -> None:
    async with asyncio.timeout(60), listening(NOTHING, ListenSettings()):
        pass
