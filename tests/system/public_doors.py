"""Everything that a client may ask a router, over HTTP and over gRPC, once each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httpx

from ferryman.client import Client
from ferryman.errors import FerrymanError
from ferryman.schedule.request import SamplingParams

FAILSAFE_SECONDS = 120
SHORT = {"max_tokens": 1}
CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
# The body of a POST, or None for a GET.
ASKED: Mapping[str, Mapping[str, Any] | None] = {
    "/v1/chat/completions": {**CHAT, **SHORT},
    "/v1/completions": {"prompt": "Hello", **SHORT},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 16},
    "/v1/messages": {**CHAT, **SHORT},
    "/v1/messages/count_tokens": CHAT,
    "/v1/responses/input_tokens": {"input": "Hello"},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [5]},
    "/v1/models": None,
}


async def statuses_over_http(url: str, key: str) -> dict[str, int]:
    """The status of each path; an empty `key` is not shown."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    found = {}
    async with httpx.AsyncClient(base_url=url, headers=headers) as web:
        for path, body in ASKED.items():
            method = "GET" if body is None else "POST"
            answer = await web.request(method, path, json=body, timeout=FAILSAFE_SECONDS)
            found[path] = answer.status_code
    return found


async def errors_over_grpc(address: str, key: str, request_id: str) -> dict[str, Exception | None]:
    """The error of each method, or None; `request_id` is the request to ask about."""
    async with Client(address, api_key=key) as client:

        async def generate() -> None:
            sampling = SamplingParams(max_tokens=1)
            async for _ in client.generate("Hello", sampling):
                pass

        calls: Mapping[str, Callable[[], Awaitable[object]]] = {
            "Generate": generate,
            "Trace": lambda: client.trace(request_id),
            "Explain": lambda: client.explain(request_id),
            "Tokenize": lambda: client.tokenize("Hello"),
            "ListModels": client.models,
        }
        return {name: await _error_of(call) for name, call in calls.items()}


async def _error_of(call: Callable[[], Awaitable[object]]) -> Exception | None:
    try:
        await call()
    except FerrymanError as error:
        return error
    return None
