"""OpenAI's own client against a running cluster: its examples, streamed and whole."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from tests.clients.page import SUM, printed

openai = pytest.importorskip("openai", reason="the extra `clients` has it")

KITE = [{"role": "user", "content": "Where is the red kite?"}]
SHAPE = {
    "type": "object",
    "properties": {"shape": {"enum": ["dot", "line"]}, "is_red": {"type": "boolean"}},
    "required": ["shape", "is_red"],
    "additionalProperties": False,
}
DRAW = {"type": "function", "function": {"name": "draw", "parameters": SHAPE}}


class Drawing(BaseModel):
    """A form that the model fills in."""

    shape: Literal["dot", "line"]
    is_red: bool


@pytest.fixture(scope="module")
def client(base_url: str) -> Any:
    with openai.OpenAI(base_url=base_url, api_key="none") as made:
        yield made


@pytest.fixture(scope="module")
def model(client: Any) -> str:
    (card,) = client.models.list().data
    return str(client.models.retrieve(card.id).id)


def test_the_page_says_how_it_is_set_up(base_url: str) -> None:
    assert printed("openai", base_url) == SUM


def test_a_stream_of_a_chat_joins_to_the_whole(client: Any, model: str) -> None:
    asked = {"model": model, "messages": KITE, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    frames = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(f.choices[0].delta.content or "" for f in frames if f.choices)
    assert text == whole.choices[0].message.content != ""
    assert frames[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_completion_has_choices_and_log_probabilities(client: Any, model: str) -> None:
    found = client.completions.create(
        model=model, prompt="The red kite is in", max_tokens=4, n=2, logprobs=2, seed=7
    )
    assert [choice.index for choice in found.choices] == [0, 1]
    shown = [len(choice.logprobs.token_logprobs) for choice in found.choices]
    assert sum(shown) == found.usage.completion_tokens


def test_an_answer_is_parsed_into_a_class(client: Any, model: str) -> None:
    answer = client.chat.completions.parse(
        model=model, messages=KITE, response_format=Drawing, max_tokens=60
    )
    assert isinstance(answer.choices[0].message.parsed, Drawing)


def test_a_demanded_call_has_arguments_under_its_schema(client: Any, model: str) -> None:
    choice = {"type": "function", "function": {"name": "draw"}}
    answer = client.chat.completions.create(
        model=model, messages=KITE, tools=[DRAW], tool_choice=choice, max_tokens=60
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "draw"
    Drawing(**json.loads(call.function.arguments))
    back = [
        *KITE,
        answer.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "drawn"},
    ]
    told = client.chat.completions.create(
        model=model, messages=back, tools=[DRAW], tool_choice="none", max_tokens=4
    )
    assert told.choices[0].finish_reason in ("stop", "length")


def test_a_stream_of_a_response_joins_to_the_whole(client: Any, model: str) -> None:
    asked = {"model": model, "input": "Where is the red kite?", "temperature": 0}
    whole = client.responses.create(**asked, max_output_tokens=12)
    with client.responses.stream(**asked, max_output_tokens=12) as stream:
        told = list(stream)
    pieces = [event.delta for event in told if event.type == "response.output_text.delta"]
    assert "".join(pieces) == whole.output_text != ""
    assert told[-1].response.usage.output_tokens == whole.usage.output_tokens


def test_a_response_is_parsed_into_a_class(client: Any, model: str) -> None:
    found = client.responses.parse(
        model=model, input="Where is the red kite?", text_format=Drawing, max_output_tokens=60
    )
    assert isinstance(found.output_parsed, Drawing)


def test_the_items_of_a_response_go_back_with_the_result_of_its_call(
    client: Any, model: str
) -> None:
    asked = {"model": model, "max_output_tokens": 60}
    tool = {"type": "function", "name": "draw", "parameters": SHAPE, "strict": True}
    choice = {"type": "function", "name": "draw"}
    first = client.responses.create(input=KITE, tools=[tool], tool_choice=choice, **asked)
    (call,) = first.output
    Drawing(**json.loads(call.arguments))
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "drawn"}
    told = client.responses.create(input=[*KITE, *first.output, result], **asked)
    assert told.status in ("completed", "incomplete")
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(input="x", previous_response_id=first.id, **asked)
    assert caught.value.param == "previous_response_id"


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_the_model_calls_a_tool_by_itself_and_tells_its_result(
    client: Any, model: str, is_streamed: bool
) -> None:
    parameters = {"type": "object", "properties": {"thing": {"type": "string"}}}
    # OpenAI's helper for streams takes strict tools alone.
    function = {"name": "find", "parameters": parameters, "strict": True}
    find = {"type": "function", "function": function}
    asked = {"model": model, "messages": KITE, "tools": [find], "temperature": 0}
    if is_streamed:
        with client.chat.completions.stream(**asked) as stream:
            choice = stream.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(**asked).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert json.loads(call.function.arguments) == {"thing": "red kite"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "The red kite is in Oslo."}
    asked["messages"] = [*KITE, choice.message, result]
    told = client.chat.completions.create(**asked).choices[0].message
    assert (told.content, told.tool_calls) == (result["content"], None)


def test_a_misspelt_field_is_named_with_the_right_spelling(client: Any, model: str) -> None:
    body = {"model": model, "messages": KITE, "extra_body": {"temprature": 1}}
    raw = client.chat.completions.with_raw_response.create(**body)
    assert raw.headers["x-ferryman-ignored"] == "temprature"
    (ignored,) = raw.parse().usage.ferryman["ignored"]
    assert ignored == "temprature (did you mean temperature?)"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=KITE)
