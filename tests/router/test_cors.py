"""Pages of other origins may call where the operator has named the origin, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from tests.harness.router import RouterCluster, cluster

from ferryman_router.doors.cors import CorsPolicy

PAGE = "https://page.example"
ALLOWED = "access-control-allow-origin"
ASKS = {"origin": PAGE, "access-control-request-method": "POST"}


async def test_without_origins_no_response_allows_any(one_pair: RouterCluster) -> None:
    asked = await one_pair.http.options("/v1/models", headers=ASKS)
    assert asked.status_code == 405
    got = await one_pair.http.get("/v1/models", headers={"origin": PAGE})
    assert [name for name in got.headers if name.startswith("access-control")] == []


async def test_a_page_of_a_named_origin_may_ask_call_and_read(nats_url: str, folder: Path) -> None:
    async with cluster(
        nats_url, folder, cors_origin=f"{PAGE}, http://a.example", api_keys="secret"
    ) as made:
        asked = await made.http.options("/v1/completions", headers=ASKS)
        assert (asked.status_code, asked.headers[ALLOWED]) == (204, PAGE)
        assert "authorization" in asked.headers["access-control-allow-headers"]
        assert "POST" in asked.headers["access-control-allow-methods"]
        body = {"prompt": "the", "max_tokens": 2, "stream": True}
        headers = {"origin": PAGE, "authorization": "Bearer secret"}
        stream = await made.http.post("/v1/completions", json=body, headers=headers)
        assert (stream.status_code, stream.headers[ALLOWED]) == (200, PAGE)
        assert "x-request-id" in stream.headers["access-control-expose-headers"]
        refused = await made.http.post("/v1/completions", json=body, headers={"origin": PAGE})
        assert (refused.status_code, refused.headers[ALLOWED]) == (401, PAGE)
        other = await made.http.get("/ping", headers={"origin": "https://other.example"})
        assert (ALLOWED in other.headers, other.headers["vary"]) == (False, "origin")


@pytest.mark.parametrize(
    ("origins", "origin", "allowed"),
    [
        ({"*"}, PAGE, "*"),
        ({"*"}, "", None),
        ({PAGE}, PAGE, PAGE),
        ({PAGE}, f"{PAGE}.evil.example", None),
        (set(), PAGE, None),
    ],
    ids=["all", "no page", "the named one", "one that begins so", "none"],
)
def test_an_origin_is_compared_whole(origins: set[str], origin: str, allowed: str | None) -> None:
    headers = httpx.Headers({**ASKS, "origin": origin})
    policy = CorsPolicy(frozenset(origins))
    response = policy.preflight("OPTIONS", headers)
    assert (response is None) == (not origins)
    if response is not None:
        policy.mark(response, headers)
        assert response.headers.get(ALLOWED) == allowed
