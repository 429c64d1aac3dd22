"""By which fields `ferryman bench serve` gets answers as long as it asks for."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from ferryman.errors import ConfigError
from ferryman_bench.endpoint.client import EndpointClient
from ferryman_bench.endpoint.inquiry import EndpointDoor
from ferryman_bench.serve.load_run import Ends, ignoring_ends, own_ends, without_ends
from ferryman_bench.serve.run import _accepted_ends

Body = Mapping[str, Any]
Server = Callable[[Body], httpx.Response]


def events(*bodies: Body) -> httpx.Response:
    lines = [f"data: {json.dumps(body)}\n\n" for body in bodies]
    return httpx.Response(200, text="".join(lines) + "data: [DONE]\n\n")


def answered() -> httpx.Response:
    return events({"choices": [{"index": 0, "delta": {"content": "yes"}}]})


def refused(status: int, text: str = "no") -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": text}})


def asks_too_many(body: Body) -> bool:
    return bool(body.get("min_tokens", 0) > body["max_tokens"])


def server_that_knows(status: int) -> Server:
    return lambda body: refused(status) if asks_too_many(body) else answered()


def server_that_ignores(_: Body) -> httpx.Response:
    return answered()


def server_of_errors_in_streams(body: Body) -> httpx.Response:
    """It answers 200, and then tells the error."""
    return events({"error": {"message": "min"}}) if asks_too_many(body) else answered()


def server_without_fields(body: Body) -> httpx.Response:
    return refused(400) if {"min_tokens", "ignore_eos"} & body.keys() else answered()


def server_that_fails_with_fields(body: Body) -> httpx.Response:
    return refused(500) if asks_too_many(body) else answered()


@asynccontextmanager
async def client_of(server: Server) -> AsyncIterator[EndpointClient]:
    transport = httpx.MockTransport(lambda request: server(json.loads(request.content)))
    async with httpx.AsyncClient(transport=transport) as http:
        yield EndpointClient(http, "http://server", EndpointDoor.CHAT, "model")


@pytest.mark.parametrize(
    ("server", "ends"),
    [
        pytest.param(server_that_knows(400), without_ends, id="bad-request"),
        pytest.param(server_that_knows(422), without_ends, id="unprocessable"),
        pytest.param(server_that_ignores, ignoring_ends, id="ignores-fields"),
        pytest.param(server_of_errors_in_streams, ignoring_ends, id="error-in-stream"),
        pytest.param(server_that_fails_with_fields, ignoring_ends, id="fails"),
        pytest.param(server_without_fields, own_ends, id="takes-no-field"),
    ],
)
async def test_a_field_is_asked_for_only_if_the_server_has_shown_that_it_knows_it(
    server: Server, ends: Ends
) -> None:
    async with client_of(server) as client:
        assert await _accepted_ends(client) is ends


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("number", [1, 2, 3])
async def test_a_busy_server_is_not_measured_whichever_trial_it_refuses(
    status: int, number: int
) -> None:
    """The same server knows `min_tokens` when it is ready; which it does not show now."""
    bodies: list[Body] = []

    def server(body: Body) -> httpx.Response:
        bodies.append(body)
        return refused(status) if len(bodies) == number else server_that_knows(400)(body)

    async with client_of(server) as client:
        with pytest.raises(ConfigError, match=f"HTTP {status}.*when it is ready"):
            await _accepted_ends(client)


@pytest.mark.parametrize("answer", [refused(400, "which model"), events({"error": "no template"})])
async def test_a_server_that_refuses_the_plain_request_is_not_measured(
    answer: httpx.Response,
) -> None:
    async with client_of(lambda _: answer) as client:
        with pytest.raises(ConfigError, match=r"http://server.*(which model|no template)"):
            await _accepted_ends(client)
