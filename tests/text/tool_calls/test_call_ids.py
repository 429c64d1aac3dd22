"""A template gets the ids of calls that it takes, whatever ids a client sends."""

from __future__ import annotations

from typing import Any

import pytest

from ferryman.errors import InvalidRequest
from ferryman.text.chat import ChatTemplate
from ferryman.text.tool_calls.call_ids import CallIds
from ferryman.text.tool_calls.formats import FreeTools, OutputSyntax, SomeTool, ToolUse
from ferryman.text.tool_calls.thought import PromptTail

KIMI = (
    "{% for m in messages %}<|im_{{ m.role }}|>{{ m.content }}{% for call in m.tool_calls or () %}"
    "<|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>"
    "{{ call.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    "{% if m.tool_call_id %}## Return of {{ m.tool_call_id }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{% for m in messages %}{% for call in m.tool_calls or () %}{% if call.id | length != 9 %}"
    "{{ raise_exception('ids are nine characters') }}{% endif %}[TOOL_CALLS]{{ call.id }}"
    "{% endfor %}{% if m.tool_call_id %}[TOOL_RESULTS]{{ m.tool_call_id }}{% endif %}{% endfor %}"
)


def _turn(*calls: tuple[str, str]) -> list[dict[str, Any]]:
    """A turn of calls, by names and ids, and their results."""
    made = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": {}}}
        for name, call_id in calls
    ]
    results = [{"role": "tool", "content": "", "tool_call_id": call_id} for _, call_id in calls]
    return [{"role": "assistant", "content": "", "tool_calls": made}, *results]


def _ids(messages: list[Any]) -> tuple[list[str], list[str]]:
    """The ids of all calls, and those of all results."""
    calls = [call["id"] for message in messages for call in message.get("tool_calls", ())]
    return calls, [message["tool_call_id"] for message in messages if "tool_call_id" in message]


NUMBERED: dict[str, tuple[list[tuple[str, str]], list[str], int]] = {
    "its own": (
        [("f", "functions.f:0"), ("ns.g", "functions.ns.g:1")],
        ["functions.f:0", "functions.ns.g:1"],
        2,
    ),
    "its own, from another number on": ([("f", "functions.f:7")], ["functions.f:7"], 8),
    # exo-explore/exo#2281: ids come back without dots and colons
    "without its characters": (
        [("f", "functions_f_4"), ("ns.g-h", "functions_ns_g-h_5")],
        ["functions.f:4", "functions.ns.g-h:5"],
        6,
    ),
    "of other models": (
        [("f", "call_0123"), ("g", "toolu_01A"), ("f", "")],
        ["functions.f:0", "functions.g:1", "functions.f:2"],
        3,
    ),
    "of another tool": ([("f", "functions.g:3")], ["functions.f:0"], 1),
    "both kinds": (
        [("f", "functions.f:2"), ("f", "call_9")],
        ["functions.f:2", "functions.f:3"],
        4,
    ),
}


@pytest.mark.parametrize(("calls", "ids", "following"), NUMBERED.values(), ids=NUMBERED.keys())
def test_ids_are_made_of_names_and_numbers(
    calls: list[tuple[str, str]], ids: list[str], following: int
) -> None:
    call_ids = CallIds.of(ChatTemplate(KIMI, {}))
    together = call_ids.fitted([{"role": "user", "content": "Go."}, *_turn(*calls)])
    assert _ids(together.messages) == (ids, ids)
    assert together.next_number == following
    apart = [message for call in calls for message in _turn(call)]
    assert _ids(call_ids.fitted(apart).messages) == (ids, ids), "numbers go through all turns"


def test_a_prefix_of_a_conversation_has_the_ids_that_it_has_in_the_whole() -> None:
    call_ids = CallIds.of(ChatTemplate(KIMI, {}))
    turns = [message for i in range(4) for message in _turn(("f", f"call_{i}"), ("g", f"c{i}"))]
    whole = call_ids.fitted(turns).messages
    for end in range(len(turns)):
        assert call_ids.fitted(turns[:end]).messages == whole[:end]


def test_mistral_gets_nine_characters() -> None:
    template = ChatTemplate(MISTRAL, {})
    messages = _turn(("f", "toolu_01ABCDEF"), ("f", "abcdef123"), ("f", "functions.f:0"))
    with pytest.raises(InvalidRequest, match="nine"):
        template.render(messages)
    fitted = CallIds.of(template).fitted(messages).messages
    calls, results = _ids(fitted)
    assert calls == results
    assert calls[1] == "abcdef123"
    assert len(set(calls)) == 3
    template.render(fitted)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{{ raise_exception('no tools here') }}",
    ],
    ids=["without calls", "refuses all"],
)
def test_other_templates_get_the_ids_that_were_sent(template: str) -> None:
    messages = [*_turn(("f", "call_1")), {"role": "user", "content": "?"}]
    assert CallIds.of(ChatTemplate(template, {})).fitted(messages).messages == messages


@pytest.mark.parametrize("calls", [None, "f", [1], [{}], [{"function": "f"}], [{"id": 3}]])
def test_what_is_no_call_stays_as_it_is(calls: Any) -> None:
    messages = [{"role": "assistant", "content": "", "tool_calls": calls}]
    for source in (KIMI, MISTRAL):
        assert CallIds.of(ChatTemplate(source, {})).fitted(messages).messages == messages


def _numbers(use: ToolUse, text: str, first_number: int) -> list[int]:
    parser = OutputSyntax.chosen("kimi_k2", "none", "").parser(
        use, PromptTail("", None, first_number)
    )
    deltas = [*parser.feed(text), *parser.flush()]
    return [delta.number for delta in deltas if hasattr(delta, "number")]


def test_a_call_keeps_its_number_unless_an_earlier_one_has_it() -> None:
    call = "<|tool_call_begin|>functions.f:{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    free = FreeTools({"f": {}})
    for written, first, numbers in (
        ((0, 1), 0, [0, 1]),
        ((4, 5), 0, [4, 5]),
        ((0, 1), 2, [2, 3]),
        ((3, 3, 0), 2, [3, 4, 5]),
    ):
        assert _numbers(free, "".join(map(call.format, written)), first) == numbers
    forced = '[{"name": "f", "parameters": {}}, {"name": "f", "parameters": {}}]'
    assert _numbers(SomeTool(), forced, 6) == [6, 7]
