"""Published weights, tokenizer and template, asked by the clients that people use.

Tiny random models hide what sizes and real text do: a vocabulary of 49,152 is a multiple of 32, and
the words of a trained model are not equally likely. Its answers are compared with transformers, or
with each other on every way; its knowledge is asked once.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import torch
from openai import BadRequestError
from tests.harness.cluster import Up
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.slow

Client = Any  # a client of OpenAI or Anthropic; its types do not know fields of ours

MODEL = "smollm2"
CAPITAL = "What is the capital of France?"
ASKED: list[Any] = [{"role": "user", "content": CAPITAL}]
PASSAGE = (
    "The lighthouse stands on the last rock of the bay, and its keeper counts the ships that pass. "
    "On Monday there were four, on Tuesday none because of the storm, and on Wednesday eleven. "
)
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather in a city, now",
    "parameters": PARAMETERS,
}
WEATHER_ASKED: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]


def test_an_answer_is_the_same_by_three_protocols_whole_and_streamed(
    chat_client: Client, messages_client: Client
) -> None:
    plain: dict[str, Any] = {"model": MODEL, "temperature": 0}
    chat = chat_client.chat.completions.create(messages=ASKED, max_tokens=24, **plain)
    answer = chat.choices[0].message.content
    assert answer is not None
    assert "Paris" in answer
    frames = chat_client.chat.completions.create(
        messages=ASKED, max_tokens=24, stream=True, **plain
    )
    assert "".join(frame.choices[0].delta.content or "" for frame in frames) == answer
    response = chat_client.responses.create(input=CAPITAL, max_output_tokens=24, **plain)
    assert response.output_text == answer
    events = chat_client.responses.create(input=CAPITAL, max_output_tokens=24, stream=True, **plain)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == answer
    # This client has no temperature of its own any more.
    greedy = {"model": MODEL, "max_tokens": 24, "extra_body": {"temperature": 0}}
    message = messages_client.messages.create(messages=ASKED, **greedy)
    assert [block.text for block in message.content if block.type == "text"] == [answer]
    with messages_client.messages.stream(messages=ASKED, **greedy) as stream:
        assert "".join(stream.text_stream) == answer


def test_a_second_turn_is_warm_and_says_what_a_cold_one_says(chat_client: Client) -> None:
    plain: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 24}
    system = {"role": "system", "content": PASSAGE * 3}
    first = chat_client.chat.completions.create(messages=[system, *ASKED], **plain)
    turns = [system, *ASKED, first.choices[0].message.model_dump(include={"role", "content"})]
    turns.append({"role": "user", "content": "And how many ships passed on Wednesday?"})
    warm = chat_client.chat.completions.create(messages=turns, **plain)
    cold = chat_client.chat.completions.create(
        messages=turns, extra_body={"cache_salt": "apart"}, **plain
    )
    assert cached_tokens(cold) == 0
    assert first.usage is not None
    assert cached_tokens(warm) > first.usage.prompt_tokens - 32
    assert warm.choices[0].message.content == cold.choices[0].message.content


def cached_tokens(answer: Any) -> int:
    return int(answer.usage.prompt_tokens_details.cached_tokens)


def test_a_long_prompt_is_read_whole_and_one_that_is_too_long_is_refused_in_numbers(
    chat_client: Client,
) -> None:
    plain: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 4}
    long = [{"role": "user", "content": PASSAGE * 40 + CAPITAL}]
    cold = chat_client.chat.completions.create(messages=long, **plain)
    warm = chat_client.chat.completions.create(messages=long, **plain)
    assert cold.usage is not None
    assert cold.usage.prompt_tokens > 1400
    assert cached_tokens(warm) > cold.usage.prompt_tokens - 32
    assert cold.choices[0].message.content == warm.choices[0].message.content
    with pytest.raises(BadRequestError, match=r"prompt is too long: \d+ tokens > \d+") as caught:
        chat_client.chat.completions.create(
            messages=[{"role": "user", "content": PASSAGE * 300}], **plain
        )
    assert caught.value.code == "context_length_exceeded"


def test_scores_of_a_prompt_are_those_of_transformers(published: Path, cluster: Up) -> None:
    answer = httpx.post(
        f"{cluster.doors[0]}/v1/completions",
        json={"prompt": PASSAGE, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 3},
        timeout=120,
    ).json()
    entries = answer["choices"][0]["prompt_logprobs"][1:]
    token_ids = AutoTokenizer.from_pretrained(published)(PASSAGE, return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(token_ids).logits[0].log_softmax(-1)
    assert len(entries) == token_ids.shape[1] - 1
    differences = []
    for position, entry in enumerate(entries):
        own = str(int(token_ids[0, position + 1]))
        assert next(iter(entry)) == own, "the prompt's own token is the first"
        for token_id, score in entry.items():
            differences.append(abs(score["logprob"] - float(expected[position, int(token_id)])))
    # Activations in bfloat16 against float32.
    assert sum(differences) / len(differences) < 0.05
    assert max(differences) < 0.5


def test_log_probabilities_of_an_answer_name_its_tokens(chat_client: Client) -> None:
    for stream in (False, True):
        answer: Any = chat_client.chat.completions.create(
            model=MODEL,
            messages=ASKED,
            max_tokens=12,
            temperature=0,
            logprobs=True,
            top_logprobs=5,
            stream=stream,
        )
        choices = [frame.choices[0] for frame in answer] if stream else answer.choices
        entries = [
            entry for choice in choices if choice.logprobs for entry in choice.logprobs.content
        ]
        texts = [getattr(choice, "delta", None) or choice.message for choice in choices]
        spelt = b"".join(bytes(entry.bytes or ()) for entry in entries).decode()
        assert spelt.startswith("".join(text.content or "" for text in texts))
        for entry in entries:
            best = [other.logprob for other in entry.top_logprobs]
            assert best == sorted(best, reverse=True)
            assert entry.logprob == best[0], "greedy"
            assert sum(map(math.exp, best)) <= 1 + 1e-6


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_a_demanded_call_has_arguments_of_its_schema(
    chat_client: Client, messages_client: Client, choice: Any
) -> None:
    is_named = choice != "required"
    tool = {"type": "function", "function": WEATHER}
    named = {"type": "function", "function": {"name": "get_weather"}} if is_named else choice
    plain: dict[str, Any] = {"model": MODEL, "temperature": 0}
    chat: Any = chat_client.chat.completions.create(
        messages=WEATHER_ASKED, tools=[tool], tool_choice=named, max_tokens=40, **plain
    )
    (call,) = chat.choices[0].message.tool_calls
    assert (chat.choices[0].finish_reason, call.function.name) == ("tool_calls", "get_weather")
    arguments = json.loads(call.function.arguments)
    jsonschema.validate(arguments, PARAMETERS)
    frames: Any = chat_client.chat.completions.create(
        messages=WEATHER_ASKED,
        tools=[tool],
        tool_choice=named,
        max_tokens=40,
        stream=True,
        **plain,
    )
    deltas = [delta for frame in frames for delta in frame.choices[0].delta.tool_calls or ()]
    assert json.loads("".join(delta.function.arguments or "" for delta in deltas)) == arguments
    response: Any = chat_client.responses.create(
        input=WEATHER_ASKED,
        tools=[{"type": "function", **WEATHER}],
        tool_choice=choice,
        max_output_tokens=40,
        **plain,
    )
    (item,) = [item for item in response.output if item.type == "function_call"]
    assert json.loads(item.arguments) == arguments
    message: Any = messages_client.messages.create(
        messages=WEATHER_ASKED,
        tools=[{"name": "get_weather", "input_schema": PARAMETERS, "description": "The weather"}],
        tool_choice={"type": "tool", "name": "get_weather"} if is_named else {"type": "any"},
        max_tokens=40,
        model=MODEL,
        extra_body={"temperature": 0},
    )
    (block,) = [block for block in message.content if block.type == "tool_use"]
    jsonschema.validate(block.input, PARAMETERS)
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"celsius": 21}'}
    called = chat.choices[0].message.model_dump(include={"role", "content", "tool_calls"})
    after = chat_client.chat.completions.create(
        messages=[*WEATHER_ASKED, called, result],
        tools=[tool],
        tool_choice="none",
        max_tokens=16,
        **plain,
    )
    assert after.choices[0].message.content


def test_tools_that_may_be_called_leave_an_answer_or_a_call(chat_client: Client) -> None:
    tool: Any = {"type": "function", "function": WEATHER}
    answers: list[Any] = [
        chat_client.chat.completions.create(
            model=MODEL, messages=messages, tools=[tool], temperature=0, max_tokens=48
        )
        for messages in (ASKED, WEATHER_ASKED)
    ]
    for answer in answers:
        message = answer.choices[0].message
        assert message.content or message.tool_calls
        assert "<tool_call>" not in (message.content or "")


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "capital": {"type": "string", "maxLength": 24},
        "population": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
        "continent": {"enum": ["Europe", "Asia", "Africa"]},
        "rivers": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 2},
    },
    "required": ["capital", "population", "continent", "rivers"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_an_answer_has_the_form_that_was_asked_for(chat_client: Client, temperature: float) -> None:
    named = {"name": "country", "schema": SCHEMA, "strict": True}
    common: dict[str, Any] = {
        "model": MODEL,
        "messages": ASKED,
        "temperature": temperature,
        "seed": 7,
    }
    answer = chat_client.chat.completions.create(
        response_format={"type": "json_schema", "json_schema": named},
        max_tokens=160,
        **common,
    )
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), SCHEMA)
    for asked, allowed in (
        ({"structured_outputs": {"choice": ["Paris", "Rome"]}}, {"Paris", "Rome"}),
        ({"structured_outputs": {"regex": "[0-9]{3}"}}, {f"{n:03}" for n in range(1000)}),
    ):
        short = chat_client.chat.completions.create(extra_body=asked, max_tokens=16, **common)
        assert short.choices[0].message.content in allowed
