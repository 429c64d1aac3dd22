"""Pydantic AI's agents against a running cluster: text, streams, tools, and typed output."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from tests.clients.page import SUM, printed

openai = pytest.importorskip("openai")
pydantic_ai = pytest.importorskip("pydantic_ai", reason="the extra `clients` has it")
openai_models = pytest.importorskip("pydantic_ai.models.openai")
openai_providers = pytest.importorskip("pydantic_ai.providers.openai")

STORY = "The red kite is in Oslo.\nWhere is the red kite?"
ANSWER = "The red kite is in Oslo."


class KiteReport(BaseModel):
    """A kite that the model describes."""

    city: Literal["Oslo", "Lima"]
    is_red: bool


@pytest.fixture
async def base_model(base_url: str) -> AsyncIterator[Any]:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as client:
        provider = openai_providers.OpenAIProvider(openai_client=client)
        yield openai_models.OpenAIChatModel("ferryman-demo", provider=provider)


@pytest.fixture
def make_agent(base_model: Any) -> Any:
    settings = pydantic_ai.ModelSettings(temperature=0, max_tokens=60)
    return lambda **more: pydantic_ai.Agent(base_model, model_settings=settings, **more)


def test_the_page_says_how_it_is_set_up(base_url: str) -> None:
    assert printed("pydantic-ai", base_url) == SUM


async def test_an_agent_answers_and_says_what_it_used(make_agent: Any) -> None:
    done = await make_agent().run(STORY)
    assert done.output == ANSWER
    assert (done.usage.requests, done.usage.output_tokens) == (1, 8)


async def test_an_agent_streams_and_goes_on(make_agent: Any) -> None:
    agent = make_agent(instructions="Be brief.")
    async with agent.run_stream(STORY) as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
    assert len(pieces) > 2
    assert "".join(pieces) == ANSWER
    said = await agent.run("Where is the red kite?", message_history=stream.all_messages())
    assert said.output == ANSWER


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_an_agent_calls_its_tool_and_answers(make_agent: Any, is_streamed: bool) -> None:
    asked: list[str] = []

    def find(thing: str) -> str:
        """Find a thing."""
        asked.append(thing)
        return ANSWER

    agent = make_agent(tools=[find])
    if is_streamed:
        async with agent.run_stream("Where is the red kite?") as stream:
            said = await stream.get_output()
    else:
        said = (await agent.run("Where is the red kite?")).output
    assert (said, asked) == (ANSWER, ["red kite"])


async def test_a_tool_may_ask_the_model_to_try_again(make_agent: Any) -> None:
    asked: list[str] = []

    def find(thing: str) -> str:
        """Find a thing."""
        asked.append(thing)
        if len(asked) == 1:
            raise pydantic_ai.ModelRetry("not here")
        return ANSWER

    # The model need not call again: it may as well tell what the tool said.
    done = await make_agent(tools=[find]).run("Where is the red kite?")
    assert asked[0] == "red kite"
    parts = [part for message in done.all_messages() for part in message.parts]
    assert "not here" in str(parts[2].content)
    assert parts[-1].part_kind == "text"


@pytest.mark.parametrize("form", ["ToolOutput", "NativeOutput"])
async def test_an_output_has_its_type(make_agent: Any, form: str) -> None:
    agent = make_agent(output_type=getattr(pydantic_ai, form)(KiteReport))
    assert isinstance((await agent.run(STORY)).output, KiteReport)


async def test_an_output_that_is_refused_is_asked_for_again(make_agent: Any) -> None:
    seen: list[KiteReport] = []

    def second_time(output: KiteReport) -> KiteReport:
        seen.append(output)
        if len(seen) == 1:
            raise pydantic_ai.ModelRetry("look again")
        return output

    agent = make_agent(output_type=KiteReport, retries=1)
    agent.output_validator(second_time)
    assert (await agent.run(STORY)).output == seen[1]
    assert len(seen) == 2


async def test_an_error_is_one_of_pydantic_ais_own(make_agent: Any) -> None:
    with pytest.raises(pydantic_ai.exceptions.ModelContextWindowExceededError):
        await make_agent().run("x " * 9000)
