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


# As browsers ask for the clients of OpenAI and Anthropic in JavaScript.
CLIENTS = {
    "openai": "authorization,content-type,openai-beta,x-stainless-arch,x-stainless-helper-method,"
    "x-stainless-lang,x-stainless-os,x-stainless-package-version,x-stainless-retry-count,"
    "x-stainless-runtime,x-stainless-runtime-version,x-stainless-timeout",
    "anthropic": "anthropic-beta,anthropic-dangerous-direct-browser-access,anthropic-version,"
    "content-type,x-api-key,x-stainless-arch,x-stainless-lang,x-stainless-retry-count",
}


@pytest.mark.parametrize("origins", [PAGE, "*"])
async def test_a_page_of_a_named_origin_may_send_the_headers_that_it_asks_for(
    nats_url: str, folder: Path, origins: str
) -> None:
    async with cluster(nats_url, folder, cors_origin=origins) as made:
        for names in CLIENTS.values():
            asks = {**ASKS, "access-control-request-headers": names}
            for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
                asked = await made.http.options(path, headers=asks)
                assert asked.status_code == 204
                assert asked.headers["access-control-allow-headers"] == names
                assert "access-control-request-headers" in asked.headers["vary"]


async def test_a_page_of_no_named_origin_may_send_nothing(nats_url: str, folder: Path) -> None:
    async with cluster(nats_url, folder, cors_origin="https://other.example") as made:
        asks = {**ASKS, "access-control-request-headers": "x-api-key"}
        asked = await made.http.options("/v1/messages", headers=asks)
        assert [name for name in asked.headers if name.startswith("access-control")] == []


@pytest.mark.parametrize("names", ["a\xa0b", "x" * 5000, "a:b", ""])
def test_what_is_no_list_of_headers_is_not_given_back(names: str) -> None:
    headers = {**ASKS, "access-control-request-headers": names}
    response = CorsPolicy(frozenset({PAGE})).preflight("OPTIONS", headers)
    assert response is not None
    assert response.headers["access-control-allow-headers"].startswith("authorization")


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
