"""OpenAI's endpoints over fake workers: whole and streamed, text, logprobs, usage, stop."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest
from tests.harness.router import SENTENCE, RouterCluster, frames

from ferryman.handoff.chain_prints import decode_prints
from ferryman.handoff.usage import CachedTokens

LONG = SENTENCE * 2


async def test_a_completion_has_text_reason_and_usage(one_pair: RouterCluster) -> None:
    response = await one_pair.complete(LONG, max_tokens=6)
    assert response.status_code == 200
    body = response.json()
    choice, usage = body["choices"][0], body["usage"]
    assert choice["text"] == one_pair.expected(6)
    assert (choice["finish_reason"], choice["index"], choice["logprobs"]) == ("length", 0, None)
    assert usage["completion_tokens"] == 6
    assert usage["total_tokens"] == usage["prompt_tokens"] + 6
    kept = usage["prompt_tokens"] // 16 * 16
    of_prompt = {"cached_tokens": 16, "cache_write_tokens": kept - 16}
    assert usage["prompt_tokens_details"] == of_prompt
    ours = usage["ferryman"]
    assert ours["request_id"] == response.headers["x-request-id"]
    assert ours["cached_tokens"] == {"device": 16, "host": 0, "storage": 0, "peer": 0}
    assert ours["uncached_reasons"] == {"never_seen": usage["prompt_tokens"] - 16}


async def test_a_chat_is_streamed_in_frames_that_join_to_the_whole(one_pair: RouterCluster) -> None:
    messages = [{"role": "user", "content": "the ferry"}]
    whole = await one_pair.post("/v1/chat/completions", messages=messages, max_tokens=9)
    stream = await one_pair.post(
        "/v1/chat/completions",
        messages=messages,
        max_tokens=9,
        stream=True,
        stream_options={"include_usage": True},
    )
    assert stream.headers["content-type"].startswith("text/event-stream")
    *said, usage, done = frames(stream.text)
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 9
    deltas = [frame["choices"][0]["delta"] for frame in said]
    assert deltas[0] == {"role": "assistant", "content": ""}
    text = "".join(delta.get("content", "") for delta in deltas)
    assert text == one_pair.expected(9) == whole.json()["choices"][0]["message"]["content"]
    assert [frame["choices"][0]["finish_reason"] for frame in said][-2:] == [None, "length"]
    assert {frame["object"] for frame in said} == {"chat.completion.chunk"}


async def test_without_include_usage_no_frame_has_any(one_pair: RouterCluster) -> None:
    stream = await one_pair.complete(max_tokens=3, stream=True)
    assert all("usage" not in frame for frame in frames(stream.text) if frame != "[DONE]")


async def test_a_stop_string_ends_the_answer_and_the_work(one_pair: RouterCluster) -> None:
    response = await one_pair.complete(max_tokens=400, stop=["state ac", "never"])
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == SENTENCE[: SENTENCE.index("state ac")]
    request_id = response.headers["x-request-id"]
    assert await one_pair.decodes[0].until_aborted(request_id) == "stop"


async def test_an_answer_that_ends_at_a_stop_string_has_what_decode_held(
    one_pair: RouterCluster,
) -> None:
    """The usage that decode would have sent with the last token does not come."""
    one_pair.decodes[0].holds = CachedTokens(device=1, host=1)
    response = await one_pair.complete(max_tokens=400, stop=["state ac", "never"])
    ferryman = response.json()["usage"]["ferryman"]
    assert ferryman["decode_cached_tokens"] == {"device": 1, "host": 1, "storage": 0, "peer": 0}


async def test_a_stop_token_ends_the_answer(one_pair: RouterCluster) -> None:
    stop = one_pair.script[4]
    response = await one_pair.complete(max_tokens=50, stop_token_ids=[stop])
    body = response.json()
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == one_pair.script.index(stop) + 1


async def test_token_ids_and_lists_of_prompts_give_a_choice_each(one_pair: RouterCluster) -> None:
    one = await one_pair.complete([5, 6, 7], max_tokens=2)
    assert one.json()["usage"]["prompt_tokens"] == 3
    many = await one_pair.complete(["the", [5, 6]], max_tokens=2)
    body = many.json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"]["completion_tokens"] == 4
    stream = await one_pair.complete(["the", [5, 6]], max_tokens=2, stream=True)
    *said, done = frames(stream.text)
    assert done == "[DONE]"
    texts = {0: "", 1: ""}
    for frame in said:
        texts[frame["choices"][0]["index"]] += frame["choices"][0]["text"]
    assert texts == {0: one_pair.expected(2), 1: one_pair.expected(2)}


async def test_logprobs_of_a_completion_are_four_lists(one_pair: RouterCluster) -> None:
    whole = await one_pair.complete(max_tokens=3, logprobs=2)
    logprobs = whole.json()["choices"][0]["logprobs"]
    assert {len(value) for value in logprobs.values()} == {3}
    assert logprobs["token_logprobs"] == [-0.25] * 3
    assert [len(top) for top in logprobs["top_logprobs"]] == [2, 2, 2]
    stream = await one_pair.complete(max_tokens=3, logprobs=2, stream=True)
    parts = [f["choices"][0]["logprobs"] for f in frames(stream.text)[:-1]]
    offsets = [offset for part in parts if part for offset in part["text_offset"]]
    assert offsets == logprobs["text_offset"]


async def test_logprobs_of_a_chat_name_tokens_with_their_bytes(one_pair: RouterCluster) -> None:
    response = await one_pair.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "x"}],
        max_tokens=2,
        logprobs=True,
        top_logprobs=1,
    )
    first = response.json()["choices"][0]["logprobs"]["content"][0]
    assert bytes(first["bytes"]).decode() == first["token"]
    assert (first["logprob"], len(first["top_logprobs"])) == (-0.25, 1)


async def test_without_a_limit_a_chat_uses_the_room_there_is(one_pair: RouterCluster) -> None:
    response = await one_pair.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": "x"}]
    )
    usage = response.json()["usage"]
    assert usage["total_tokens"] == 512


async def test_models_health_ready_and_metrics_answer(one_pair: RouterCluster) -> None:
    await one_pair.complete(LONG, max_tokens=4)
    models = (await one_pair.http.get("/v1/models")).json()
    assert [model["id"] for model in models["data"]] == ["tiny"]
    assert (await one_pair.http.get("/v1/models/tiny")).status_code == 200
    assert (await one_pair.http.get("/v1/models/other")).status_code == 404
    assert (await one_pair.http.get("/health")).status_code == 200
    ready = await one_pair.http.get("/ready")
    assert (ready.status_code, ready.json()["status"]) == (200, "ready")
    metrics = (await one_pair.http.get("/metrics")).text
    for line in (
        'ferryman_router_requests_total{outcome="length"} 1.0',
        'ferryman_router_cached_tokens_total{tier="device"} 16.0',
        'ferryman_router_uncached_tokens_total{reason="never_seen"}',
        "ferryman_router_first_token_seconds_count 1.0",
        "ferryman_router_token_gap_seconds_count 3.0",
        'ferryman_router_responses_total{door="http",status="200"}',
        "ferryman_router_queue_requests 0.0",
    ):
        assert line in metrics


async def test_ready_counts_host_caches_and_needs_none(one_pair: RouterCluster) -> None:
    fleet = one_pair.router.components.frontend.ctx.fleet
    assert (await one_pair.http.get("/ready")).json()["host_caches"] == 0
    beat = replace(one_pair.prefills[0].beat, role="hostcache", worker_id="hostcache-00000001")
    beat = replace(beat, address="127.0.0.1:9", node="n1")
    fleet.on_heartbeat(beat, time.monotonic())
    ready = await one_pair.http.get("/ready")
    assert (ready.status_code, ready.json()["host_caches"]) == (200, 1)


async def test_the_lifecycle_of_a_request_is_told(one_pair: RouterCluster) -> None:
    traceparent = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    headers = {"x-request-id": "told-1", "traceparent": traceparent}
    response = await one_pair.http.post(
        "/v1/completions", json={"prompt": "the", "max_tokens": 2}, headers=headers
    )
    assert response.headers["x-request-id"] == "told-1"
    assert await one_pair.life_of("told-1") == ["received", "routed", "finished"]
    found = await one_pair.recorded(one_pair.subjects.all_life_of("told-1"))
    assert {json.loads(one.payload)["traceparent"][:35] for one in found} == {traceparent[:35]}
    order = one_pair.prefills[0].orders[0]
    assert order.context.traceparent[:35] == traceparent[:35]


async def test_the_log_says_which_requests_share_a_prefix_and_nothing_else(
    one_pair: RouterCluster,
) -> None:
    prints, facts = {}, {}
    for request_id, prompt in (("first", LONG), ("second", LONG * 2), ("third", "no " + LONG)):
        await one_pair.http.post(
            "/v1/completions",
            json={"prompt": prompt, "max_tokens": 40},
            headers={"x-request-id": request_id},
        )
        await one_pair.life_of(request_id)
        pattern = one_pair.subjects.all_life_of(request_id)
        for event in map(json.loads, await payloads(one_pair, pattern)):
            if event["event"] in ("received", "finished"):
                facts[request_id, event["event"]] = event["facts"]
                prints[request_id, event["event"]] = decode_prints(event["facts"]["chain"])
    prompt_pages = facts["first", "received"]["tokens"] // 16
    finished_pages = (facts["first", "finished"]["prompt"] + 40) // 16
    assert facts["first", "received"]["page_size"] == 16
    assert len(prints["first", "received"].prints) == prompt_pages
    assert len(prints["first", "finished"].prints) == finished_pages > prompt_pages
    first = prints["first", "received"]
    assert first.shared_pages(prints["first", "finished"]) == prompt_pages
    assert first.shared_pages(prints["second", "received"]) == prompt_pages
    assert first.shared_pages(prints["third", "received"]) == 0


async def payloads(cluster: RouterCluster, pattern: str) -> list[bytes]:
    return [one.payload for one in await cluster.recorded(pattern)]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_keeps_its_page_keys_and_settings_on_the_way(
    one_pair: RouterCluster, stream: bool
) -> None:
    await one_pair.complete(LONG, max_tokens=2, seed=7, temperature=0.5, stream=stream)
    request = one_pair.prefills[0].orders[0].request
    assert (request.sampling.seed, request.sampling.temperature) == (7, 0.5)
    assert len(request.keys) == len(request.token_ids) // 16


async def test_a_name_that_is_repeated_is_an_id_once(one_pair: RouterCluster) -> None:
    headers, body = {"x-request-id": "once-1"}, {"prompt": "the", "max_tokens": 2}
    answers = [
        await one_pair.http.post("/v1/completions", json=body, headers=headers) for _ in range(3)
    ]
    assert {one.status_code for one in answers} == {200}
    assert {one.headers["x-request-id"] for one in answers} == {"once-1"}
    ids = [one.json()["usage"]["ferryman"]["request_id"] for one in answers]
    assert ids[0] == "once-1"
    assert len(set(ids)) == 3
    for request_id in ids:
        assert await one_pair.life_of(request_id) == ["received", "routed", "finished"]


async def test_control_tokens_in_a_callers_words_count_only_when_asked_for(
    one_pair: RouterCluster,
) -> None:
    tokenizer = one_pair.router.components.frontend.ctx.model.tokenizer
    end, words = tokenizer.encoder.token_to_id("</s>"), "one</s>two"
    asks: list[tuple[str, dict[str, Any], int]] = [
        ("/v1/completions", {"prompt": words}, 0),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": words}]}, 1),
    ]
    for path, body, of_template in asks:
        for asked in (False, True):
            special = {"ferryman": {"parse_special": True}} if asked else {}
            answer = await one_pair.post(path, **body, **special, max_tokens=1)
            assert answer.status_code == 200
            token_ids = one_pair.prefills[0].orders[-1].request.token_ids.tolist()
            assert token_ids.count(end) == of_template + asked, (path, asked)
    bad = await one_pair.post("/v1/completions", prompt="a", ferryman={"parse_special": 1})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "ferryman.parse_special")
