"""Formats of tool calls whose arguments are one JSON object: they differ in marks and names.

granite       <|tool_call|>[{"name": …, "arguments": {…}}]               Granite 3; also <tool_call>
hermes        <tool_call>{"name": …, "arguments": {…}}</tool_call>       Qwen 2.5 and 3, Granite 4
llama3_json   {"name": …, "parameters": {…}}; …, alone in the answer     Llama 3.1 to 3.3
mistral       [TOOL_CALLS][{"name": …, "arguments": {…}}]
              [TOOL_CALLS]name{…} or [TOOL_CALLS]name[ARGS]{…}           tokenizers from version 11
deepseek_v3
    <｜tool▁call▁begin｜>function<｜tool▁sep｜>name\\n```json\\n{…}\\n```<｜tool▁call▁end｜>
    <｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>                since V3.1

A call of a tool that was offered may also stand at the beginning of an answer without its mark, or
in a fence: models that were trained on other marks, and long prompts, bring that about.
"""

from __future__ import annotations

from functools import partial

from ferryman.text.tool_calls.call_object import (
    FENCE,
    MAX_NAME_CHARS,
    TOOL_NAME,
    Names,
    calls,
    end_of_fence,
    fence_language,
)
from ferryman.text.tool_calls.deltas import DeltaSink
from ferryman.text.tool_calls.grammar import (
    Grammar,
    Malformed,
    attempt,
    expect,
    marked_text,
    skip_space,
    spaced,
    text_until,
    word_until,
)
from ferryman.text.tool_calls.json_text import TextBuffer, json_object
from ferryman.text.tool_calls.tags.qwen3_coder import (
    BEGIN,
    END,
    FUNCTION,
    FUNCTION_END,
    marked_call,
    tagged_call,
)
from ferryman.text.tool_calls.value_types import Parameters

GRANITE_MARKS = ("<|tool_call|>", "<tool_call>")  # the word, where a tokenizer has no such token
HERMES_BEGIN, HERMES_END = BEGIN, END
LLAMA_BEGIN = "<|python_tag|>"
MISTRAL_BEGIN, MISTRAL_ID, MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
DEEPSEEK_CALLS, DEEPSEEK_CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL, DEEPSEEK_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"


def granite(sink: DeltaSink, parameters: Parameters) -> Grammar[None]:
    """Text, and calls after marks."""
    openings = dict.fromkeys(GRANITE_MARKS, partial(_json_calls, sink))
    openings[FENCE] = partial(_fenced, sink, parameters.keys())
    first = yield from _bare_calls(sink, parameters.keys())
    yield from marked_text(sink, openings, (END,), first)


def hermes(sink: DeltaSink, parameters: Parameters) -> Grammar[None]:
    """Text, and calls between marks; several calls may share one pair of marks."""
    names = parameters.keys()
    openings = {
        BEGIN: partial(marked_call, sink, parameters),
        FUNCTION: partial(tagged_call, sink, parameters, names),
        FENCE: partial(_fenced, sink, names),
    }
    first = yield from _bare_calls(sink, names)
    yield from marked_text(sink, openings, (END,), first)


def llama3_json(sink: DeltaSink, parameters: Parameters) -> Grammar[None]:
    """Calls when the text begins with one; otherwise text, up to a mark or a fence."""
    names = parameters.keys()
    openings = {
        LLAMA_BEGIN: partial(_json_calls, sink),
        FUNCTION: partial(tagged_call, sink, parameters, names),
        FENCE: partial(_fenced, sink, names),
    }
    first = yield from _bare_calls(sink, names)
    yield from marked_text(sink, openings, (FUNCTION_END,), first)


def _bare_calls(sink: DeltaSink, names: Names) -> Grammar[str | None]:
    """Calls of known names without a mark, at the beginning of a text. Returns what follows."""
    space, first = yield from spaced()
    bracket = ""
    if first == "[":
        inner, first = yield from spaced()
        bracket = "[" + inner
    if first == "{":
        return (yield from attempt(sink, space + bracket + first, calls(sink, first, names)))
    if first:
        sink.content(space)
        return bracket + first
    sink.content(space + bracket)
    return first


def _json_calls(sink: DeltaSink) -> Grammar[str]:
    """Calls of any names behind a mark. Returns what follows."""
    return (yield from calls(sink, (yield from skip_space())))


def _fenced(sink: DeltaSink, names: Names) -> Grammar[str]:
    """Calls of known names in a fence whose mark was read. Returns what follows."""
    first = yield from fence_language()
    return (yield from calls(sink, first, names, is_fenced=True))


def mistral(sink: DeltaSink, parameters: Parameters) -> Grammar[None]:
    """Text, and calls after marks."""
    names = parameters.keys()
    openings = {
        MISTRAL_BEGIN: partial(_mistral_calls, sink, names),
        FENCE: partial(_fenced, sink, names),
    }
    first = yield from _bare_calls(sink, names)
    yield from marked_text(sink, openings, following=first)


def _mistral_calls(sink: DeltaSink, names: Names) -> Grammar[str]:
    first = yield from skip_space()
    if first in ("[", "{", FENCE[0]):
        return (yield from calls(sink, first))
    written, ends = TextBuffer(MAX_NAME_CHARS), (MISTRAL_ARGUMENTS, MISTRAL_ID, "{")
    mark = yield from text_until(written.add, ends, first)
    if mark == MISTRAL_ID:
        _, mark = yield from word_until((MISTRAL_ARGUMENTS, "{"), MAX_NAME_CHARS)
    brace = mark if mark != MISTRAL_ARGUMENTS else (yield from skip_space())
    return (yield from _call(sink, written.text.strip(), brace, names))


def _call(sink: DeltaSink, name: str, brace: str, names: Names) -> Grammar[str]:
    """A call whose arguments begin with this brace. One of `names` has none at the end of a text
    that the model ended. Returns the first character behind them that is no space."""
    is_over = not brace and not sink.is_cut and name in names
    if not TOOL_NAME.fullmatch(name) or not (brace == "{" or is_over):
        raise Malformed
    sink.begin_call(name)
    if is_over:
        sink.arguments("{}")
        return ""
    yield from json_object(sink.arguments)
    return (yield from skip_space())


def deepseek_v3(sink: DeltaSink, parameters: Parameters) -> Grammar[None]:
    """Text, and calls; the marks around all calls are passed over."""
    openings = {
        DEEPSEEK_CALLS: partial(_deepseek_calls, sink, parameters.keys()),
        DEEPSEEK_CALL: partial(_deepseek_call, sink, parameters.keys()),
    }
    yield from marked_text(sink, openings, (DEEPSEEK_CALL_END, DEEPSEEK_CALLS_END))


def _deepseek_calls(sink: DeltaSink, names: Names) -> Grammar[str]:
    yield from expect(DEEPSEEK_CALL, (yield from skip_space()))
    return (yield from _deepseek_call(sink, names))


def _deepseek_call(sink: DeltaSink, names: Names) -> Grammar[str]:
    """A kind, perhaps a name, and arguments, perhaps in a fence. Without a name the kind is it."""
    kind, _ = yield from word_until((DEEPSEEK_SEPARATOR,), MAX_NAME_CHARS)
    head = TextBuffer(MAX_NAME_CHARS)
    mark = yield from text_until(head.add, ("{", DEEPSEEK_CALL_END))
    words = head.text.replace(f"{FENCE}json", " ").replace(FENCE, " ").split() or [kind.strip()]
    name = " ".join(words)
    if mark == DEEPSEEK_CALL_END and TOOL_NAME.fullmatch(name):
        sink.begin_call(name)
        sink.arguments("{}")
        return mark
    character = yield from _call(sink, name, mark, names)
    if FENCE in head.text and character == FENCE[0]:
        outcome = yield from attempt(sink, character, end_of_fence())
        return outcome if outcome is not None else (yield)
    return character
