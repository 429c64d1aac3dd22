"""Metrics and ledgers of a locked process: who may read them, and how refusals are counted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from tests.cluster_keys import KEY, STRANGERS_KEY, token_of

from ferryman.runtime.access import MetricsAccess, MetricsGuard
from ferryman.runtime.http_server import HttpAnswer, json_answer, listening, observed
from ferryman.runtime.metrics import CONTENT_TYPE, Metrics
from ferryman.security.credentials import ClusterRole, RoleCredentials, credentials_of
from ferryman.settings.groups import ListenSettings

OBSERVER = f"Bearer {token_of(ClusterRole.OBSERVER)}"
OF_DECODE = credentials_of(KEY, ClusterRole.DECODE)


@asynccontextmanager
async def shown(credentials: RoleCredentials | None) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a decode worker's numbers and health."""
    metrics = Metrics("decode")
    app = observed(
        {"/health": lambda: json_answer({"status": "ok"})},
        {"/metrics": lambda: HttpAnswer(metrics.render(), CONTENT_TYPE)},
        MetricsGuard(MetricsAccess(credentials), metrics).check,
    )
    async with listening(app, ListenSettings()) as port:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            yield client


STRANGERS: dict[str, list[str]] = {
    "nothing": [],
    "no token": ["Bearer"],
    "a guess": ["Bearer guess"],
    "no scheme": [token_of(ClusterRole.OBSERVER)],
    "another scheme": [f"Basic {token_of(ClusterRole.OBSERVER)}"],
    "another cluster's": [f"Bearer {token_of(ClusterRole.OBSERVER, STRANGERS_KEY)}"],
    "two": [OBSERVER, OBSERVER],
}


@pytest.mark.parametrize("given", STRANGERS.values(), ids=STRANGERS)
async def test_a_stranger_reads_no_numbers_and_is_counted(given: list[str]) -> None:
    headers = [("authorization", each) for each in given]
    async with shown(OF_DECODE) as client:
        refused = await client.get("/metrics", headers=headers)
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert "ferryman_" not in refused.text
        assert (await client.get("/health")).json() == {"status": "ok"}
        numbers = await client.get("/metrics", headers={"authorization": OBSERVER})
    counted = 'decode_refused_reads_total{path="/metrics",reason="Unauthenticated"} 1.0'
    assert counted in numbers.text


@pytest.mark.parametrize("role", [role for role in ClusterRole if role != ClusterRole.OBSERVER])
async def test_another_role_is_refused(role: ClusterRole) -> None:
    async with shown(OF_DECODE) as client:
        refused = await client.get(
            "/metrics", headers={"authorization": f"Bearer {token_of(role)}"}
        )
        assert refused.status_code == 403
        numbers = await client.get("/metrics", headers={"authorization": OBSERVER})
    assert 'reason="PermissionDenied"} 1.0' in numbers.text


async def test_the_scheme_may_be_written_in_any_case() -> None:
    async with shown(OF_DECODE) as client:
        asked = {"authorization": OBSERVER.replace("Bearer", "bearer")}
        assert (await client.get("/metrics", headers=asked)).status_code == 200


async def test_an_open_cluster_shows_its_numbers_to_all() -> None:
    async with shown(None) as client:
        assert (await client.get("/metrics")).status_code == 200
