"""LiteLLM against a running cluster: whole, streamed, async, tools, forms, and its own errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from tests.clients.page import SUM, printed

from ferryman.errors import FerrymanError, QueueFull, Unauthenticated
from ferryman_router.answers.errors import problem_response

pytestmark = pytest.mark.filterwarnings("default")  # LiteLLM's own, at import and at exit

QUESTION = {"role": "user", "content": "Where is the red kite?"}
STORY = [{"role": "user", "content": "The red kite is in Oslo.\nWhere is the red kite?"}]
ANSWER = "The red kite is in Oslo."
FIND = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Find a thing",
        "parameters": {
            "type": "object",
            "properties": {"thing": {"type": "string", "enum": ["red kite"]}},
            "required": ["thing"],
        },
    },
}


class KitePlace(BaseModel):
    """A kite that the model describes."""

    city: Literal["Oslo", "Lima"]
    is_red: bool


@pytest.fixture(scope="module")
def litellm() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the Internet
        yield pytest.importorskip("litellm", reason="pip install 'ferryman[clients]' has litellm")


@pytest.fixture
def options(base_url: str) -> dict[str, Any]:
    return {
        "model": "openai/ferryman-demo",
        "api_base": base_url,
        "api_key": "none",
        "temperature": 0,
        "max_tokens": 40,
        "max_retries": 0,
    }


def test_the_page_says_how_it_is_set_up(litellm: Any, base_url: str) -> None:
    assert printed("litellm", base_url) == SUM


def test_an_answer_comes_whole_and_in_pieces(litellm: Any, options: dict[str, Any]) -> None:
    whole = litellm.completion(messages=STORY, **options)
    assert whole.choices[0].message.content == ANSWER
    assert whole.usage.completion_tokens == 8
    more = {"stream": True, "stream_options": {"include_usage": True}}
    pieces = list(litellm.completion(messages=STORY, **more, **options))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == ANSWER
    assert pieces[-1].usage.completion_tokens == 8


async def test_an_answer_comes_to_a_coroutine(litellm: Any, options: dict[str, Any]) -> None:
    whole = await litellm.acompletion(messages=STORY, **options)
    assert whole.choices[0].message.content == ANSWER
    stream = await litellm.acompletion(messages=STORY, stream=True, **options)
    said = [piece.choices[0].delta.content or "" async for piece in stream]
    assert len(said) > 2
    assert "".join(said) == ANSWER


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {}}])
def test_a_call_its_result_and_the_answer(
    litellm: Any, options: dict[str, Any], choice: Any
) -> None:
    if isinstance(choice, dict):
        choice["function"]["name"] = "find"
    asked = {"tools": [FIND], **options}
    message = (
        litellm.completion(messages=[QUESTION], tool_choice=choice, **asked).choices[0].message
    )
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "find",
        {"thing": "red kite"},
    )
    result = {"role": "tool", "tool_call_id": call.id, "content": ANSWER}
    told = litellm.completion(messages=[QUESTION, message, result], **asked)
    assert told.choices[0].message.content == ANSWER
    assert told.choices[0].finish_reason == "stop"


def test_a_streamed_call_is_put_together(litellm: Any, options: dict[str, Any]) -> None:
    pieces = list(litellm.completion(messages=[QUESTION], tools=[FIND], stream=True, **options))
    built = litellm.stream_chunk_builder(pieces, messages=[QUESTION])
    (call,) = built.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"thing": "red kite"}
    assert built.choices[0].finish_reason == "tool_calls"


def test_an_answer_has_the_form_of_a_class(litellm: Any, options: dict[str, Any]) -> None:
    told = litellm.completion(messages=STORY, response_format=KitePlace, **options)
    KitePlace.model_validate_json(told.choices[0].message.content)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"messages": []}, "BadRequestError"),
        ({"messages": [{"role": "user", "content": "x " * 9000}]}, "ContextWindowExceededError"),
        ({"max_tokens": 9000}, "ContextWindowExceededError"),
        ({"model": "openai/other"}, "NotFoundError"),
    ],
    ids=["bad request", "long prompt", "long answer", "other model"],
)
def test_errors_are_litellms_own(
    litellm: Any, options: dict[str, Any], changes: dict[str, Any], error: str
) -> None:
    with pytest.raises(getattr(litellm, error)):
        litellm.completion(**{"messages": STORY, **options, **changes})


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (Unauthenticated("an API key is needed"), "AuthenticationError"),
        (QueueFull("the queue is full", 2.0), "RateLimitError"),
    ],
    ids=["no key", "full queue"],
)
def test_refusals_are_litellms_own(
    litellm: Any, options: dict[str, Any], error: FerrymanError, name: str
) -> None:
    """Over a server that says nothing else: neither can be had of the cluster at will."""
    response = problem_response(error)

    class Refusal(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(response.status_code)
            for key, value in response.headers.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(bytes(response.body))

    with HTTPServer(("127.0.0.1", 0), Refusal) as server:
        Thread(target=server.serve_forever).start()
        try:
            options["api_base"] = f"http://127.0.0.1:{server.server_port}/v1"
            with pytest.raises(getattr(litellm, name)):
                litellm.completion(messages=STORY, **options)
        finally:
            server.shutdown()
