"""Fields of vLLM's completions: the prompt's text, tokens by their ids, no added tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.harness.router import RouterCluster, frames

from ferryman_router.intake.body_intake import LARGE_BYTES


@pytest.mark.parametrize("size", [0, LARGE_BYTES], ids=["small", "large"])
async def test_an_echo_has_the_prompt_before_the_answer(one_pair: RouterCluster, size: int) -> None:
    prompts: list[Any] = [
        "the ferry",
        one_pair.router.components.frontend.ctx.model.tokenizer.encode("the river").tolist(),
    ]
    body = {"prompt": prompts, "max_tokens": 3, "n": 2, "echo": True}
    content = json.dumps(body).encode() + b" " * size
    whole = (await one_pair.http.post("/v1/completions", content=content)).json()
    said = [choice["text"] for choice in whole["choices"]]
    answer = one_pair.expected(3)
    assert said == ["the ferry" + answer] * 2 + ["the river" + answer] * 2
    stream = await one_pair.complete("the ferry", max_tokens=3, echo=True, stream=True)
    texts = [frame["choices"][0]["text"] for frame in frames(stream.text)[:-1]]
    assert texts[0] == "the ferry"
    assert "".join(texts) == "the ferry" + answer


async def test_tokens_are_named_by_their_ids(one_pair: RouterCluster) -> None:
    asked = {"max_tokens": 3, "return_tokens_as_token_ids": True}
    text = (await one_pair.complete(logprobs=1, **asked)).json()["choices"][0]["logprobs"]
    ids = [f"token_id:{one}" for one in one_pair.script[:3]]
    assert text["tokens"] == ids
    assert [list(top) for top in text["top_logprobs"]] == [[one] for one in ids]
    plain = (await one_pair.complete(logprobs=1, max_tokens=3)).json()["choices"][0]["logprobs"]
    assert text["text_offset"] == plain["text_offset"]
    chat = await one_pair.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "x"}],
        logprobs=True,
        top_logprobs=1,
        **asked,
    )
    entries = chat.json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ids
    assert bytes(entries[0]["bytes"]).decode() == plain["tokens"][0]


async def test_no_token_is_added_where_none_is_wanted(one_pair: RouterCluster) -> None:
    tokenizer = one_pair.router.components.frontend.ctx.model.tokenizer
    wanted = tokenizer.encode("the ferry", add_special_tokens=False).tolist()
    for size in (0, LARGE_BYTES):
        body = {"prompt": "the ferry", "max_tokens": 1, "add_special_tokens": False}
        content = json.dumps(body).encode() + b" " * size
        assert (await one_pair.http.post("/v1/completions", content=content)).status_code == 200
        assert one_pair.prefills[0].orders[-1].request.token_ids.tolist() == wanted
    with_all = await one_pair.complete("the ferry", max_tokens=1, add_special_tokens=True)
    assert with_all.json()["usage"]["prompt_tokens"] == len(tokenizer.encode("the ferry"))


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 3, "n": 2, "stream": True}, "best_of"),
        ({"best_of": 33, "prompt": ["a", "b"]}, "best_of"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"truncation_side": "right"}, "truncation_side"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_the_rest_is_refused_with_its_reason(
    one_pair: RouterCluster, more: dict[str, Any], param: str
) -> None:
    error = (await one_pair.complete(**{"max_tokens": 2, **more})).json()["error"]
    assert (error["param"], len(error["message"]) > 30) == (param, True)


async def test_a_chat_has_its_control_tokens_from_the_template(one_pair: RouterCluster) -> None:
    messages = [{"role": "user", "content": "x"}]
    asked = {"messages": messages, "max_tokens": 1}
    fine = await one_pair.post("/v1/chat/completions", **asked, add_special_tokens=False)
    assert fine.status_code == 200
    error = (await one_pair.post("/v1/chat/completions", **asked, add_special_tokens=True)).json()
    assert error["error"]["param"] == "add_special_tokens"
