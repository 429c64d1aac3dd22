"""Log probabilities of a prompt over HTTP: vLLM's field in both endpoints, and a completion's echo.

The fake prefill gives the token at position i the log probability -i / 8 and the rank i; the ids
behind it are named as the likeliest.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from tests.harness.router import RouterCluster, frames

from ferryman.schedule.request import FinishReason
from ferryman_router.answers.logprobs import echoed_logprobs
from ferryman_router.intake.body_intake import LARGE_BYTES

PROMPT = "the ferry carries state"


class PromptWords:
    """The prompt's tokens, and the texts of all."""

    def __init__(self, made: RouterCluster) -> None:
        self.tokenizer = made.router.components.frontend.ctx.model.tokenizer
        self.ids: list[int] = self.tokenizer.encode(PROMPT).tolist()

    def text(self, token_id: int) -> str:
        return self.tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    def field(self, ids: list[int], num_best: int) -> list[Any]:
        """`prompt_logprobs` by hand."""

        def entry(i: int, place: int) -> dict[str, Any]:
            rank = place or i
            text = self.text(ids[i] + place)
            return {"logprob": -i / 8 - place, "rank": rank, "decoded_token": text}

        places = range(1 + num_best)
        rest = [{str(ids[i] + p): entry(i, p) for p in places} for i in range(1, len(ids))]
        return [None, *rest]


@pytest.mark.parametrize("size", [0, LARGE_BYTES], ids=["small", "large"])
async def test_each_choice_of_a_completion_has_those_of_its_prompt(
    one_pair: RouterCluster, size: int
) -> None:
    words = PromptWords(one_pair)
    body = {"prompt": [PROMPT, [7]], "max_tokens": 2, "n": 2, "prompt_logprobs": 2}
    content = json.dumps(body).encode() + b" " * size
    answer = (await one_pair.http.post("/v1/completions", content=content)).json()
    found = [choice["prompt_logprobs"] for choice in answer["choices"]]
    assert found == [*[words.field(words.ids, 2)] * 2, [None], [None]]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    asked = [order.request.prompt_logprobs for order in one_pair.prefills[0].orders]
    assert sorted(asked, key=str) == [2, 2, None, None], "only the first choice of a prompt asks"


async def test_the_best_of_several_answers_has_them_too(one_pair: RouterCluster) -> None:
    words = PromptWords(one_pair)
    answer = (await one_pair.complete(PROMPT, max_tokens=2, best_of=3, prompt_logprobs=0)).json()
    assert [choice["prompt_logprobs"] for choice in answer["choices"]] == [
        words.field(words.ids, 0)
    ]


async def test_a_chat_has_them_beside_its_choices(one_pair: RouterCluster) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    answer = await one_pair.post("/v1/chat/completions", **asked, n=2, prompt_logprobs=1)
    ids = one_pair.prefills[0].orders[0].request.token_ids.tolist()
    assert answer.json()["prompt_logprobs"] == PromptWords(one_pair).field(ids, 1)
    assert "prompt_logprobs" not in answer.json()["choices"][0]
    without = await one_pair.post("/v1/chat/completions", **asked)
    assert "prompt_logprobs" not in without.json()


def _lists(words: PromptWords, answer: list[int], shown: int) -> dict[str, list[Any]]:
    """The four lists of an echo with its answer, by hand."""
    texts = [words.text(token_id) for token_id in (*words.ids, *answer)]
    offsets = [sum(map(len, texts[:at])) for at in range(len(texts))]
    own = [None, *(-i / 8 for i in range(1, len(words.ids)))]
    tops: list[Any] = [None]
    for i in range(1, len(words.ids)):
        # The fake's own token has the rank i, and those behind it the ranks from 1 on.
        ranked = sorted((p or i, p != 0, p) for p in range(1 + shown))
        best = dict.fromkeys([*(place for _, _, place in ranked[:shown]), 0])
        tops.append({words.text(words.ids[i] + p): -i / 8 - p for p in best})
    return {
        "tokens": texts,
        "token_logprobs": [*own, *[-0.25] * len(answer)],
        "top_logprobs": [*tops, *({words.text(token_id): -0.25} for token_id in answer)],
        "text_offset": offsets,
    }


async def test_an_echo_has_log_probabilities_from_the_prompt_on(one_pair: RouterCluster) -> None:
    words, answer = PromptWords(one_pair), list(one_pair.script[:3])
    wanted = _lists(words, answer, 1)
    asked: dict[str, Any] = {"max_tokens": 3, "echo": True, "logprobs": 1}
    whole = (await one_pair.complete(PROMPT, **asked)).json()["choices"][0]
    assert whole["text"] == PROMPT + one_pair.expected(3)
    assert whole["logprobs"] == wanted
    assert "prompt_logprobs" not in whole
    stream = frames((await one_pair.complete(PROMPT, stream=True, **asked)).text)[:-1]
    choices = [frame["choices"][0] for frame in stream]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    assert {name: [one for part in parts for one in part[name]] for name in wanted} == wanted
    both = (await one_pair.complete(PROMPT, prompt_logprobs=3, **asked)).json()["choices"][0]
    assert both["prompt_logprobs"] == words.field(words.ids, 3)
    assert both["logprobs"]["token_logprobs"] == wanted["token_logprobs"]


async def test_the_scores_of_a_streamed_echo_are_written_beside_the_loop(
    one_pair: RouterCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    written_by: list[int] = []

    def noted(*scored: Any) -> Mapping[str, list[Any]]:
        written_by.append(threading.get_ident())
        return echoed_logprobs(*scored)

    monkeypatch.setattr("ferryman_router.answers.completion_output.echoed_logprobs", noted)
    asked: dict[str, Any] = {"max_tokens": 1, "echo": True, "logprobs": 1}
    await one_pair.complete(PROMPT, stream=True, **asked)
    assert len(written_by) == 1
    assert threading.get_ident() not in written_by


async def test_an_echo_may_be_all_that_is_wanted(one_pair: RouterCluster) -> None:
    words = PromptWords(one_pair)
    asked: dict[str, Any] = {"max_tokens": 0, "echo": True, "logprobs": 1}
    whole = (await one_pair.complete(PROMPT, **asked)).json()["choices"][0]
    assert (whole["text"], whole["finish_reason"]) == (PROMPT, str(FinishReason.LENGTH))
    assert whole["logprobs"] == _lists(words, [], 1)
    stream = frames((await one_pair.complete(PROMPT, stream=True, **asked)).text)[:-1]
    assert "".join(frame["choices"][0]["text"] for frame in stream) == PROMPT
    assert (await one_pair.complete(PROMPT, max_tokens=0, echo=True)).json()["choices"][0][
        "text"
    ] == PROMPT


async def test_too_long_a_prompt_is_refused_with_the_length_that_is_not(
    one_pair: RouterCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ferryman.schedule.prompt_scores.MAX_ENTRIES", 30)
    error = (await one_pair.complete([7] * 16, max_tokens=1, prompt_logprobs=1)).json()["error"]
    assert (error["param"], "at most 15 tokens" in error["message"]) == ("prompt_logprobs", True)
    fine = await one_pair.complete([7] * 15, max_tokens=1, prompt_logprobs=1)
    assert fine.status_code == 200
