"""Cases that the public tests of vLLM's and SGLang's OpenAI servers have, for clients of those."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.harness.router import RouterCluster, frames

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


@ENDPOINTS
async def test_a_seed_of_minus_one_is_any_seed(one_pair: RouterCluster, path: str) -> None:
    for seed in (-1, -1, -2):
        await one_pair.post(path, **ASKED[path], max_tokens=1, seed=seed)
    first, second, third = (order.request.sampling.seed for order in one_pair.prefills[0].orders)
    assert len({first, second, -1}) == 3
    assert third == -2


async def test_events_of_a_response_have_their_usage_at_the_end(one_pair: RouterCluster) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"input": "hi", "max_output_tokens": 3, "stream": True, "stream_options": options}
    text = (await one_pair.post("/v1/responses", **body)).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert all("usage" not in event for event in events)
    assert events[-1]["response"]["usage"]["output_tokens"] == 3


# A form that cannot be compiled is named by its kind.
BOTH: list[tuple[str, dict[str, Any], str]] = [
    (TEXT, {"prompt": [[]]}, "prompt"),
    (TEXT, {"prompt": [""]}, "prompt"),
    (TEXT, {"prompt": ["the", ""]}, "prompt"),
    (TEXT, {"prompt": [[-1]]}, "prompt[0]"),
    (TEXT, {"logprobs": -2}, "logprobs"),
    (TEXT, {"prompt_logprobs": "1"}, "prompt_logprobs"),
    (TEXT, {"structured_outputs": {"regex": "[.*"}}, "regex"),
    (TEXT, {"structured_outputs": {"regex": {"1": "a"}}}, "structured_outputs.regex"),
    (TEXT, {"structured_outputs": {"json": {"properties": {"a": "b"}}}}, "json_schema"),
    (TEXT, {"structured_outputs": {"grammar": "root ::= nothing"}}, "grammar"),
    (TEXT, {"structured_outputs": 3}, "structured_outputs"),
    (CHAT, {"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    (CHAT, {"seed": 2**63}, "seed"),
    (CHAT, {"seed": -(2**63) - 1}, "seed"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"tool_choice": 123}, "tool_choice"),
    (CHAT, {"logit_bias": {"999999": 1}}, "logit_bias"),
    (CHAT, {"stop_token_ids": [999999]}, "stop_token_ids"),
    (CHAT, {"messages": []}, "messages"),
]


async def test_bodies_that_both_refuse_are_refused_by_name(one_pair: RouterCluster) -> None:
    for path, more, param in BOTH:
        response = await one_pair.post(path, **{**ASKED[path], "max_tokens": 2, **more})
        assert response.status_code == 400, more
        assert response.json()["error"]["param"] == param, more
    assert one_pair.prefills[0].orders == []
