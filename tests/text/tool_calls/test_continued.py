"""An answer that goes on with a message is read from the place where the message stands."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.text.tool_calls.samples import PARIS, Answer, read

from ferryman.text.tool_calls.thought import ContinuedMessage

CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'

# The format of thoughts, the message, what the model goes on with, and its reading.
CONTINUED: dict[str, tuple[str, ContinuedMessage, str, Answer]] = {
    "an open thought": (
        "qwen3",
        ContinuedMessage("<think>\nTwo and"),
        " two.\n</think>\n\nFour.",
        Answer("Four.", " two.\n", ()),
    ),
    "nothing but the mark": (
        "qwen3",
        ContinuedMessage("\n<think>\n"),
        "So.</think>Four.",
        Answer("Four.", "So.", ()),
    ),
    "a thought alone": (
        "qwen3",
        ContinuedMessage("Two and", is_thought=True),
        " two.</think>Four.",
        Answer("Four.", " two.", ()),
    ),
    "a thought that stays open": (
        "deepseek_r1",
        ContinuedMessage("<think>Two"),
        " and <",
        Answer("", " and <", ()),
    ),
    "a thought that ends at once": (
        "qwen3",
        ContinuedMessage("<think>"),
        "</think>\n\nFour.",
        Answer("Four.", "", ()),
    ),
    "a call behind the thought": (
        "qwen3",
        ContinuedMessage("<think>Paris"),
        "!</think>" + CALL,
        Answer("", "!", (PARIS,)),
    ),
    "a thought that is over": (
        "qwen3",
        ContinuedMessage("<think>2 + 2</think>It is"),
        " four.",
        Answer(" four.", "", ()),
    ),
    "a thought that ends with the message": (
        "deepseek_r1",
        ContinuedMessage("<think>17*23 = 391.</think>"),
        "It is 391.",
        Answer("It is 391.", "", ()),
    ),
    "text of a model that thinks first": (
        "deepseek_r1",
        ContinuedMessage("It is"),
        " four.",
        Answer(" four.", "", ()),
    ),
    "a mark in the middle of a text": (
        "qwen3",
        ContinuedMessage("Models write <think>"),
        " to think.",
        Answer(" to think.", "", ()),
    ),
    "words that begin a thought elsewhere": (
        "qwen3",
        ContinuedMessage("The tag is"),
        "<think>, I think.",
        Answer("<think>, I think.", "", ()),
    ),
    "Mistral's marks": (
        "mistral",
        ContinuedMessage("[THINK]Hm"),
        "m.[/THINK]Four.",
        Answer("Four.", "m.", ()),
    ),
    "Granite's words": (
        "granite",
        ContinuedMessage("Here is my thought process: 2+2"),
        " is 4. Here is my response: 4",
        Answer("4", " is 4. ", ()),
    ),
    "a message of harmony, a thought": (
        "openai_gptoss",
        ContinuedMessage("Two and", is_thought=True),
        " two.<|end|><|start|>assistant<|channel|>final<|message|>Four.<|return|>",
        Answer("Four.", " two.", ()),
    ),
    "a message of harmony, text": (
        "openai_gptoss",
        ContinuedMessage("It is"),
        " four.<|end|><|start|>assistant<|channel|>analysis<|message|>So.<|end|>",
        Answer(" four.", "So.", ()),
    ),
}


@pytest.mark.parametrize(
    ("reasoning", "message", "text", "expected"), CONTINUED.values(), ids=CONTINUED.keys()
)
def test_an_answer_is_read_from_where_its_message_stands(
    reasoning: str, message: ContinuedMessage, text: str, expected: Answer
) -> None:
    tools = "openai" if reasoning == "openai_gptoss" else "hermes"
    cuts = [[text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))]
    for pieces in cuts:
        assert read(tools, pieces, reasoning=reasoning, continued=message) == expected, pieces


@given(before=st.text(max_size=8), after=st.text(max_size=8), text=st.text(max_size=8))
def test_what_goes_on_with_a_thought_is_that_thought_up_to_its_mark(
    before: str, after: str, text: str
) -> None:
    message = ContinuedMessage(f"<think>{before}")
    answer = read("none", [f"{after}</think>{text}"], reasoning="qwen3", continued=message)
    assert answer.reasoning == after
    assert answer.content == text.lstrip()


OPEN = "<think>I call."
CALLED = "<tool_call>\n" + CALL.removeprefix("<tool_call>") + "\n"
UNCLOSED = {
    # vllm-project/vllm#39056, ollama/ollama#13764
    "a call at the end": (f"{OPEN}\n{CALLED}", (PARIS,)),
    "two calls": (f"{OPEN}{CALL}\n{CALL}", (PARIS, PARIS)),
    "tags": (f"{OPEN}\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n", (PARIS,)),
    # PrimeIntellect-ai/renderers#78, verl-project/verl#4757
    "a call that is spoken of": (f"{OPEN} {CALL} would do.", ()),
    "a rehearsal, and a call": (f"{OPEN} {CALL} would do. {CALL}", (PARIS,)),
    "the beginning of a call": (f"{OPEN} <tool_call>", ()),
    "a call that cannot be read": (f"{OPEN} <tool_call>Paris</tool_call>", ()),
}


@pytest.mark.parametrize(("text", "calls"), UNCLOSED.values(), ids=UNCLOSED.keys())
def test_an_answer_ends_with_a_call_behind_a_thought_without_its_mark(
    text: str, calls: tuple[tuple[str, str], ...]
) -> None:
    tools = "qwen3_coder" if "<function" in text else "hermes"
    thought = text.removeprefix("<think>")
    for pieces in ([text], list(text)):
        assert read(tools, pieces, reasoning="qwen3") == Answer("", thought, calls)
        cut = read(tools, pieces, reasoning="qwen3", is_cut=True)
        assert cut == Answer("", thought, ()), "a model that was cut off may have gone on thinking"
    closed = read(tools, [f"{text}</think>So."], reasoning="qwen3")
    assert closed == Answer("So.", thought, ())
    # vybestack/llxprt-code#749: nothing comes behind the thought, and a client waits for a call.
    for pieces in ([f"{text}</think>\n"], list(f"{text}</think>\n")):
        assert read(tools, pieces, reasoning="qwen3") == Answer("", thought, calls)
        cut = read(tools, pieces, reasoning="qwen3", is_cut=True)
        assert cut == Answer("", thought, ()), "a model that was cut off may have said more"
