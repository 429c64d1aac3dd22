"""A thought that was opened in the prompt goes on as a thought, in every protocol."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.harness.router import RouterCluster, events, frames
from tests.router.tool_folders import joined_message, prompt_text, tool_cluster, tool_folder

from ferryman_router.intake.body_intake import LARGE_BYTES

# Of the kind of Qwen 3's, which shows the thought of the last turn.
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content.strip('\n') }}\n</think>\n\n"
    "{% endif %}{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}{# tools #}"
)
USER = {"role": "user", "content": "two and two?"}
SAID = "and two.\n</think>\n\nFour."
OPEN = {"role": "assistant", "content": "<think>\nTwo "}
THOUGHT = {"role": "assistant", "content": None, "reasoning_content": "Two"}
OVER = {"role": "assistant", "content": "<think>2+2</think>It is "}


@pytest.fixture
async def thinking(nats_url: str, tmp_path: Path) -> AsyncIterator[RouterCluster]:
    async with tool_cluster(nats_url, tool_folder(tmp_path, TEMPLATE), SAID) as made:
        yield made


async def _chat(cluster: RouterCluster, last: Any, **more: Any) -> Any:
    body = {"messages": [USER, last], "max_tokens": 80, "continue_final_message": True, **more}
    response = await cluster.post("/v1/chat/completions", **body)
    assert response.status_code == 200, response.text
    return response


@pytest.mark.parametrize(
    ("last", "end"),
    [(OPEN, "<|assistant|><think>\nTwo "), (THOUGHT, "<|assistant|><think>\nTwo")],
    ids=["in the text", "a thought alone"],
)
async def test_a_chat_goes_on_with_a_thought(thinking: RouterCluster, last: Any, end: str) -> None:
    whole = (await _chat(thinking, last)).json()
    assert prompt_text(thinking).endswith(end)
    message = whole["choices"][0]["message"]
    assert message["reasoning_content"] == "and two.\n"
    assert message["content"] == "Four."
    stream = joined_message(frames((await _chat(thinking, last, stream=True)).text)[:-1])
    assert (stream["reasoning_content"], stream["content"]) == ("and two.\n", "Four.")
    details = whole["usage"]["completion_tokens_details"]
    assert 0 < details["reasoning_tokens"] < whole["usage"]["completion_tokens"]


@pytest.mark.parametrize("size", [0, LARGE_BYTES], ids=["small", "large"])
@pytest.mark.parametrize("last", [OPEN, OVER], ids=["open", "over"])
async def test_a_body_of_any_size_goes_on_with_what_stands_last(
    thinking: RouterCluster, last: Any, size: int
) -> None:
    body = {"messages": [USER, last], "max_tokens": 80, "continue_final_message": True}
    sent = json.dumps(body).encode() + b" " * size
    response = await thinking.http.post("/v1/chat/completions", content=sent)
    message = response.json()["choices"][0]["message"]
    if last is OPEN:
        assert message["reasoning_content"] == "and two.\n"
    else:
        assert message == {"role": "assistant", "content": SAID}


BLOCKS = {
    "a text": "<think>\nTwo ",
    "a block of text": [{"type": "text", "text": "<think>\nTwo "}],
    "a block of a thought": [{"type": "thinking", "thinking": "Two", "signature": ""}],
}


@pytest.mark.parametrize("content", BLOCKS.values(), ids=BLOCKS.keys())
async def test_a_message_goes_on_with_a_thought(thinking: RouterCluster, content: Any) -> None:
    body = {"messages": [USER, {"role": "assistant", "content": content}], "max_tokens": 80}
    whole = (await thinking.post("/v1/messages", **body)).json()
    expected = [
        {"type": "thinking", "thinking": "and two.\n", "signature": ""},
        {"type": "text", "text": "Four."},
    ]
    assert whole["content"] == expected
    stream = events((await thinking.post("/v1/messages", stream=True, **body)).text)
    begun = [event["content_block"]["type"] for event in stream if "content_block" in event]
    assert begun == ["thinking", "text"]
    deltas = [event["delta"] for event in stream if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "and two.\n"
    assert "".join(delta.get("text", "") for delta in deltas) == "Four."


async def test_a_response_goes_on_with_the_thought_that_the_template_opens(
    thinking: RouterCluster,
) -> None:
    body = {"input": "two and two?", "max_output_tokens": 80}
    thought, text = (await thinking.post("/v1/responses", **body)).json()["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "and two.\n"}]
    assert text["content"][0]["text"] == "Four."
    stream = events((await thinking.post("/v1/responses", stream=True, **body)).text)
    thoughts = [e["delta"] for e in stream if e["type"] == "response.reasoning_text.delta"]
    assert "".join(thoughts) == "and two.\n"


async def test_a_thought_that_the_template_does_not_show_cannot_be_continued(
    nats_url: str, tmp_path: Path
) -> None:
    async with tool_cluster(nats_url, tool_folder(tmp_path), SAID) as plain:
        body = {"messages": [USER, THOUGHT], "continue_final_message": True}
        refused = await plain.post("/v1/chat/completions", **body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "continue_final_message"
