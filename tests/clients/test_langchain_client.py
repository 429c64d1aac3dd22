"""LangChain's client against a running cluster: streams, tools, and structured output."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field
from tests.clients.page import SUM, printed

langchain_openai = pytest.importorskip("langchain_openai", reason="the extra `clients` has it")
langchain_core_tools = pytest.importorskip("langchain_core.tools")
langchain_core_exceptions = pytest.importorskip("langchain_core.exceptions")

ANSWER = "The red kite is in Oslo."


def find(thing: Literal["red kite"]) -> str:
    """Find a thing."""
    return ANSWER


class Kite(BaseModel):
    """A kite in the sky."""

    is_red: bool = Field(description="whether it is red")


@pytest.fixture(scope="module")
def chat(base_url: str) -> Any:
    return langchain_openai.ChatOpenAI(
        base_url=base_url, api_key="none", model="ferryman-demo", temperature=0, max_tokens=60
    )


def test_the_page_says_how_it_is_set_up(base_url: str) -> None:
    assert printed("langchain-openai", base_url) == SUM


def test_an_answer_comes_whole_and_in_pieces(chat: Any) -> None:
    whole = chat.invoke("Where is the red kite?")
    pieces = "".join(piece.content for piece in chat.stream("Where is the red kite?"))
    assert whole.content == pieces != ""
    assert whole.usage_metadata["output_tokens"] > 0


@pytest.mark.parametrize("choice", ["auto", "any", "find"])
def test_a_bound_tool_is_called_and_its_result_told(chat: Any, choice: str) -> None:
    tools = [langchain_core_tools.tool(find)]
    asked = [("user", "Where is the red kite?")]
    called = chat.bind_tools(tools, tool_choice=choice).invoke(asked)
    (call,) = called.tool_calls
    assert (call["name"], call["args"]) == ("find", {"thing": "red kite"})
    told = chat.bind_tools(tools).invoke([*asked, called, tools[0].invoke(call)])
    assert (told.content, told.tool_calls) == (ANSWER, [])


def test_a_streamed_call_is_put_together(chat: Any) -> None:
    bound = chat.bind_tools([langchain_core_tools.tool(find)])
    streamed = None
    for piece in bound.stream("Where is the red kite?"):
        streamed = piece if streamed is None else streamed + piece
    assert streamed is not None
    assert streamed.tool_calls[0]["args"] == {"thing": "red kite"}


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_output_is_an_object_of_its_class(chat: Any, method: str) -> None:
    structured = chat.with_structured_output(Kite, method=method)
    assert isinstance(structured.invoke('Repeat:\n{"is_red": true}'), Kite)


def test_an_overflow_is_langchains_own_error(chat: Any) -> None:
    with pytest.raises(langchain_core_exceptions.ContextOverflowError):
        chat.invoke("x " * 9000)
