"""Cases that the public tests of vLLM's and SGLang's OpenAI servers have, for clients of those."""

from __future__ import annotations

from typing import Any

import pytest
from tests.router.cluster import RouterCluster, frames

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    TEXT: {"prompt": "the ferry"},
}
ENDPOINTS = pytest.mark.parametrize("path", [CHAT, TEXT], ids=["chat", "text"])


async def _choices(cluster: RouterCluster, path: str, **more: Any) -> list[dict[str, Any]]:
    """The choice of a whole answer, and those of the frames of a stream."""
    body = {**ASKED[path], **more}
    whole = (await cluster.post(path, **body)).json()
    stream = frames((await cluster.post(path, **body, stream=True)).text)[:-1]
    return [whole["choices"][0], *(frame["choices"][0] for frame in stream)]


@ENDPOINTS
async def test_an_answer_names_the_stop_string_or_token_that_ended_it(
    one_pair: RouterCluster, path: str
) -> None:
    stop = one_pair.script[4]
    cases: list[tuple[dict[str, Any], object]] = [
        ({"stop": ["state ac", "never"]}, "state ac"),
        ({"stop_token_ids": [stop]}, stop),
        ({"max_tokens": one_pair.script.index(stop) + 1}, None),
    ]
    for more, wanted in cases:
        whole, *said = await _choices(one_pair, path, **{"max_tokens": 100, **more})
        assert (whole["stop_reason"], said[-1]["stop_reason"]) == (wanted, wanted), more
        assert all("stop_reason" not in choice for choice in said[:-1])


@pytest.mark.parametrize("ignores", [False, True])
async def test_an_end_of_the_models_own_is_named_only_where_it_is_the_callers_wish(
    one_pair: RouterCluster, ignores: bool
) -> None:
    tokenizer = one_pair.router.components.frontend.ctx.model.tokenizer
    (end,) = tokenizer.eos_token_ids
    script = (*one_pair.script[:3], end)
    for worker in (*one_pair.prefills, *one_pair.decodes):
        worker.script = script
    more = {"stop_token_ids": [end], "ignore_eos": ignores, "max_tokens": 50}
    whole = (await _choices(one_pair, TEXT, **more))[0]
    assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", end if ignores else None)


@pytest.mark.parametrize("echo", [False, True])
async def test_a_drawn_token_is_among_its_alternatives(one_pair: RouterCluster, echo: bool) -> None:
    body = {**ASKED[TEXT], "max_tokens": 3, "echo": echo}
    for asked in (0, 1):
        found = (await one_pair.post(TEXT, **body, logprobs=asked)).json()
        logprobs = found["choices"][0]["logprobs"]
        rows = list(zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))[int(echo) :]
        assert all(token in top for token, top in rows)
        assert {len(top) for _, top in rows} <= {max(1, asked), asked + 1}


async def test_every_frame_of_a_text_has_what_was_asked_for(one_pair: RouterCluster) -> None:
    more = {"max_tokens": 3, "logprobs": 1, "return_token_ids": True}
    _, *said = await _choices(one_pair, TEXT, **more)
    ids = [token_id for choice in said for token_id in choice["token_ids"]]
    names = [name for choice in said for name in choice["logprobs"]["tokens"]]
    assert ids == list(one_pair.script[:3])
    assert len(names) == 3


@ENDPOINTS
async def test_every_frame_has_the_usage_so_far(one_pair: RouterCluster, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**ASKED[path], "max_tokens": 3, "stream": True, "stream_options": options}
    *said, end = frames((await one_pair.post(path, **body)).text)
    assert end == "[DONE]"
    usages = [frame["usage"] for frame in said]
    assert [usage["completion_tokens"] for usage in usages][-2:] == [3, 3]
    assert {usage["prompt_tokens"] for usage in usages} == {usages[-1]["prompt_tokens"]}


OFF: dict[str, Any] = {
    "use_beam_search": False,
    "length_penalty": 1.0,
    "store": False,
    "modalities": ["text"],
    "truncation_side": "left",
    "return_hidden_states": False,
    "no_stop_trim": False,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "logits_processors": [],
    "kv_transfer_params": {},
    "thinking_token_budget": -1,
}


@ENDPOINTS
async def test_what_is_not_offered_may_be_declined(one_pair: RouterCluster, path: str) -> None:
    body = {**ASKED[path], "max_tokens": 1}
    fine = await one_pair.post(path, **body, **OFF)
    assert fine.status_code == 200, fine.text
    asked: dict[str, Any] = {
        "use_beam_search": True,
        "length_penalty": 0.5,
        "truncation_side": "right",
        "separate_reasoning": False,
        "data_parallel_rank": 0,
        "reasoning": {"effort": "low"},
        "input_ids": [1],
    }
    for name, value in asked.items():
        error = (await one_pair.post(path, **body, **{name: value})).json()["error"]
        assert (error["param"], "is not offered" in error["message"]) == (name, True)


async def test_a_text_is_tokenized_with_special_tokens_or_without(one_pair: RouterCluster) -> None:
    tokenizer = one_pair.router.components.frontend.ctx.model.tokenizer
    for adds in (True, False):
        body = {"prompt": "the ferry", "add_special_tokens": adds}
        wanted = tokenizer.encode("the ferry", add_special_tokens=adds).tolist()
        assert (await one_pair.post("/tokenize", **body)).json()["tokens"] == wanted
    chat = {**ASKED[CHAT], "add_special_tokens": True}
    error = (await one_pair.post("/tokenize", **chat)).json()["error"]
    assert error["param"] == "add_special_tokens"
    assert (await one_pair.post("/tokenize", **ASKED[CHAT], add_special_tokens=False)).is_success


async def test_a_model_names_its_root(one_pair: RouterCluster) -> None:
    (model,) = (await one_pair.http.get("/v1/models")).json()["data"]
    assert (model["root"], model["parent"]) == ("tiny", None)
