"""The log probabilities of a response belong to its message: those of thoughts and calls are not
among them, wherever a worker has cut its frames."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tests.router.tool_folders import tool_folder

from ferryman.cache.manifest import Exactness
from ferryman.handoff.offsets import TokenFrame, extend_hash
from ferryman.schedule.request import FinishReason, SamplingParams
from ferryman.text.located_prompt import LocatedPrompt
from ferryman.text.tokenizer import Tokenizer
from ferryman.text.tool_calls.formats import FreeTools, OutputSyntax
from ferryman.wire.public import GenerateFinished, TokenPrompt
from ferryman.wire.values import RequestTokens, Usage
from ferryman_router.answers.chat_output import OutputReading
from ferryman_router.answers.logprobs import TokenNames
from ferryman_router.answers.response_format import AnsweredChoice
from ferryman_router.answers.response_header import ResponseHeader
from ferryman_router.answers.responses_output import ResponsesFormat
from ferryman_router.bodies.parsed_request import AnswerOptions
from ferryman_router.request.metrics import RouterMetrics
from ferryman_router.request.response import ResponseStream
from ferryman_router.routing.generate_request import (
    PUBLIC,
    Caller,
    GenerateRequest,
    RequestedSampling,
    TokenizedRequest,
)

TEXT = '<think>Hm, 日.</think>Well, the river.<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(tool_folder(tmp_path_factory.mktemp("tools") / "folder"))


def answered(tokenizer: Tokenizer, size: int) -> AnsweredChoice:
    """The answer of a worker that sends so many tokens in a frame."""
    params, ids = SamplingParams(logprobs=1), np.array([1], dtype="<u4")
    caller = Caller("request", PUBLIC, 10.0, "")
    request = GenerateRequest(caller, "", TokenPrompt(ids), RequestedSampling(params), arrived=0.0)
    asked = TokenizedRequest(request, LocatedPrompt(ids), params, frozenset())
    stream = ResponseStream(asked, tokenizer, RouterMetrics(), lambda: 1.0)
    stream.begin_attempt(1)
    token_ids = tuple(tokenizer.encode(TEXT, add_special_tokens=False).tolist())
    for begin in range(0, len(token_ids), size):
        some = token_ids[begin : begin + size]
        frame = TokenFrame(1, begin, some, extend_hash(0, token_ids[: begin + size]))
        logprobs = tuple({token_id: -1.0 - begin - at} for at, token_id in enumerate(some))
        stream.take(RequestTokens("request", frame, logprobs))
    stream.finish(FinishReason.STOP, Usage(1), Exactness.BITS)
    assert isinstance(stream.output_log.end, GenerateFinished)
    return AnsweredChoice(stream.output_log.chunks, stream.output_log.end)


def told(tokenizer: Tokenizer, size: int) -> list[Any]:
    """The events of the response, as their data."""
    heading = ResponseHeader("resp_1", "m", 0, 1, TokenNames(tokenizer))
    syntax = OutputSyntax.chosen("hermes", "qwen3", "")
    reading = OutputReading(syntax, FreeTools({"f": {}}), AnswerOptions(), [""])
    form, answer = ResponsesFormat(heading, {}, reading), answered(tokenizer, size)
    frames = [*(form.tokens(0, chunk) for chunk in answer.chunks), form.last(0, answer)]
    lines = b"".join(frames).decode().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


@pytest.mark.parametrize("size", [2, 3, 7, 16, 500])
def test_no_cut_of_a_workers_frames_moves_a_log_probability(
    tokenizer: Tokenizer, size: int
) -> None:
    by_token = told(tokenizer, 1)
    done = [event for event in by_token if event["type"] == "response.output_text.done"]
    assert [event["text"] for event in done] == ["Well, the river."]
    spelt = "".join(entry["token"] for entry in done[0]["logprobs"])
    assert spelt.endswith("Well, the river."), "its tokens, and the mark that ends the thought"
    assert "Hm" not in spelt
    assert told(tokenizer, size) == by_token
