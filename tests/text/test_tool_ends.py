"""A marked tool ends where a prompt with fewer tools parts, however the template writes tools."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tests.text.folders import CHAT_TEMPLATE, write_folder

from ferryman.schedule.request import Pin
from ferryman.text.chat import ChatTemplate
from ferryman.text.chat_places import MAX_BREAKPOINTS, located_chat
from ferryman.text.located_prompt import LocatedPrompt
from ferryman.text.marked_turn import MarkedChat, MarkedTurn, TextBreakpoint, ToolBreakpoint
from ferryman.text.tokenizer import Tokenizer
from ferryman.text.tool_ends import MAX_TOOL_BREAKPOINTS
from ferryman.wire.codec.request import MAX_PINS
from ferryman.wire.public import ChatTurn

SYSTEM = ChatTurn("system", "the ferry carries state across the river")
USER = ChatTurn("user", "seventeen wagons wait")
FIVE_MINUTES, HOUR = 300, 3600
# In few words, how published templates write tools, and what stands behind the second of three.
WRITTEN = {
    "lines": (  # Qwen, GLM, Granite 4
        "{% if tools %}<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n</tools>"
        "{% endif %}",
        '"properties": {}}}}\n',
    ),
    "a list": ("{% if tools %}{{ tools | tojson }}{% endif %}", '"properties": {}}}}'),  # Kimi
    "types": (  # gpt-oss
        "namespace functions {\n\n{% for t in tools or [] %}// {{ t.function.description }}\n"
        "type {{ t.function.name }} = () => any;\n\n{% endfor %}} // namespace",
        "type tool_1 = () => any;\n\n",
    ),
    "tags": (  # Gemma 4
        "{% for t in tools or [] %}<tool>{{ t.function.name }}{{ t.function.description | upper }}"
        "{{ t.function.description }}</tool>{% endfor %}",
        "of 1 wagons</tool>",
    ),
}
NAMES_FIRST = (
    "Call {{ tools | map(attribute='function.name') | join(' or ') }}:" + (WRITTEN["lines"][0])
)
LATE = (  # Mistral
    "{% for m in messages %}{% if loop.last and tools %}{{ tools | tojson }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)


def tool(number: int) -> dict[str, Any]:
    description = f'Does "it":\nfor a <ferry> of {number} wagons'
    parameters = {"type": "object", "properties": {}}
    function = {"name": f"tool_{number}", "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


THREE = [tool(number) for number in range(3)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_folder(tmp_path_factory.mktemp("tools")))


def encoded(
    tokenizer: Tokenizer, template: str, tools: list[Any], turns: tuple[ChatTurn, ...]
) -> tuple[Tokenizer, list[dict[str, str]], Any]:
    made = replace(tokenizer, chat_template=ChatTemplate(template, {"eos_token": "</s>"}))
    messages = [{"role": turn.role, "content": turn.content} for turn in turns]
    return made, messages, made.encode_chat(messages, variables={"tools": tools})


def located(
    tokenizer: Tokenizer,
    template: str,
    *marks: ToolBreakpoint,
    tools: list[Any] = THREE,
    turns: tuple[ChatTurn, ...] = (SYSTEM, USER),
) -> LocatedPrompt:
    made, messages, ids = encoded(tokenizer, template, tools, turns)
    variables = {"tools": tools}
    chat = MarkedChat(turns, False, json.dumps(variables), marks)
    return located_chat(made, chat, messages, variables, ids)


@pytest.mark.parametrize("before", ["", "{{ messages[0].content }}\n"], ids=["first", "second"])
@pytest.mark.parametrize("way", WRITTEN)
def test_a_mark_is_at_the_end_of_its_tool(tokenizer: Tokenizer, way: str, before: str) -> None:
    """A prompt with other later tools, or without any, has that place too."""
    source, ending = WRITTEN[way]
    template = before + source + CHAT_TEMPLATE
    marks = ToolBreakpoint(1, HOUR), ToolBreakpoint(2, FIVE_MINUTES)
    prompt = located(tokenizer, template, *marks)
    second, last = prompt.breakpoints
    told = [tokenizer.spelt(prompt.token_ids[: pin.position].tolist()) for pin in (second, last)]
    # A token may hold the tool's last characters and the first of what follows.
    assert ending[:-4] in told[0][-len(ending) - 2 :]
    assert (second.seconds, last.seconds) == (HOUR, FIVE_MINUTES)
    assert "of 2 wagons" not in told[0]
    assert "of 2 wagons" in told[1]
    assert {second.position, last.position} <= set(prompt.fork_points)
    for others in ([*THREE[:2], tool(7)], THREE[:2]):
        _, _, ids = encoded(tokenizer, template, others, (SYSTEM, USER))
        assert ids[: second.position].tolist() == prompt.token_ids[: second.position].tolist()


def test_where_all_names_stand_first_a_mark_is_at_the_end_of_the_beginning(
    tokenizer: Tokenizer,
) -> None:
    template = NAMES_FIRST + CHAT_TEMPLATE
    prompt = located(tokenizer, template, ToolBreakpoint(1, HOUR))
    assert prompt.breakpoints == (Pin(prompt.fork_points[-1], HOUR),)
    told = tokenizer.spelt(prompt.token_ids[: prompt.fork_points[-1]].tolist())
    assert SYSTEM.content in told
    assert USER.content not in told


def test_tools_that_stand_before_the_latest_message_have_no_place(tokenizer: Tokenizer) -> None:
    turns = (SYSTEM, USER, ChatTurn("assistant", "yes"), USER)
    assert located(tokenizer, LATE, ToolBreakpoint(1, HOUR), turns=turns).breakpoints == ()
    (pin,) = located(tokenizer, LATE, ToolBreakpoint(1, HOUR)).breakpoints
    assert pin.position > 20


def test_the_latest_marks_count(tokenizer: Tokenizer) -> None:
    tools = [tool(number) for number in range(9)]
    marks = [ToolBreakpoint(number, FIVE_MINUTES) for number in range(9)]
    template = WRITTEN["lines"][0] + CHAT_TEMPLATE
    pins = located(tokenizer, template, *marks, tools=tools).breakpoints
    assert len(pins) == MAX_TOOL_BREAKPOINTS
    told = tokenizer.spelt(located(tokenizer, template, *marks, tools=tools).token_ids.tolist())
    begin = tokenizer.spelt(
        located(tokenizer, template, tools=tools).token_ids[: pins[0].position].tolist()
    )
    assert told.startswith(begin)
    assert "of 5 wagons" in begin
    assert "of 6 wagons" not in begin


@pytest.mark.parametrize("num_texts", [MAX_PINS - 1, MAX_PINS, MAX_PINS + 1])
def test_marks_of_tools_and_of_texts_are_no_more_than_a_worker_takes(
    tokenizer: Tokenizer, num_texts: int
) -> None:
    """The last ones count, and those are in the texts."""
    marks = tuple(TextBreakpoint(6 * num + 5, HOUR) for num in range(num_texts))
    turns = (SYSTEM, MarkedTurn("user", "wagon " * num_texts, breakpoints=marks))
    tools = [ToolBreakpoint(number, FIVE_MINUTES) for number in range(3)]
    template = WRITTEN["lines"][0] + CHAT_TEMPLATE
    texts = located(tokenizer, template, turns=turns).breakpoints
    pins = located(tokenizer, template, *tools, turns=turns).breakpoints
    assert len(pins) == MAX_BREAKPOINTS == MAX_PINS
    assert pins[-len(texts) :] == texts
