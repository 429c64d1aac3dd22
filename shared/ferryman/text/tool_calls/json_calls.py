"""Formats of tool calls whose arguments are one JSON object: they differ in marks and names.

granite       <|tool_call|>[{"name": …, "arguments": {…}}]               Granite 3; also <tool_call>
hermes        <tool_call>{"name": …, "arguments": {…}}</tool_call>       Qwen 2.5 and 3, Granite 4
llama3_json   {"name": …, "parameters": {…}}; …, alone in the answer     Llama 3.1 to 3.3
mistral       [TOOL_CALLS][{"name": …, "arguments": {…}}]
              [TOOL_CALLS]name{…} or [TOOL_CALLS]name[ARGS]{…}           tokenizers from version 11
deepseek_v3
    <｜tool▁call▁begin｜>function<｜tool▁sep｜>name\\n```json\\n{…}\\n```<｜tool▁call▁end｜>
    <｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>                since V3.1
"""

from __future__ import annotations

from ferryman.text.tool_calls.call_object import call_list, call_object, marked_call_list
from ferryman.text.tool_calls.deltas import DeltaSink
from ferryman.text.tool_calls.grammar import (
    Grammar,
    Malformed,
    attempt,
    expect,
    skip_space,
    text_until,
    word_until,
)
from ferryman.text.tool_calls.json_text import json_object

MAX_NAME_CHARS = 256
GRANITE_MARKS = ("<|tool_call|>", "<tool_call>")  # the word, where a tokenizer has no such token
HERMES_BEGIN, HERMES_END = "<tool_call>", "</tool_call>"
LLAMA_BEGIN = "<|python_tag|>"
MISTRAL_BEGIN, MISTRAL_ID, MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
DEEPSEEK_CALLS, DEEPSEEK_CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL, DEEPSEEK_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"


def granite(sink: DeltaSink) -> Grammar[None]:
    """Text, and lists of calls after marks."""
    while mark := (yield from text_until(sink.content, GRANITE_MARKS)):
        yield from marked_call_list(sink, mark)


def hermes(sink: DeltaSink) -> Grammar[None]:
    """Text, and calls between marks; several calls may share one pair of marks."""
    while (yield from text_until(sink.content, (HERMES_BEGIN,))):
        yield from attempt(sink, HERMES_BEGIN, _hermes_calls(sink))


def _hermes_calls(sink: DeltaSink) -> Grammar[None]:
    character = yield from skip_space()
    if character != "{":
        raise Malformed
    while character == "{":
        yield from call_object(sink)
        character = yield from skip_space()
    # A model may end its turn without the last mark.
    if character:
        yield from expect(HERMES_END, character)


def llama3_json(sink: DeltaSink) -> Grammar[None]:
    """Calls when the text begins with one; otherwise text, up to a mark.

    In the middle of a text without a mark there is no call.
    """
    space = ""
    while (first := (yield)).isspace():
        space += first
    if first == "{":
        yield from attempt(sink, space + first, _llama_calls(sink))
    elif first == "<":
        is_mark = yield from attempt(sink, space + first, _llama_mark())
        if is_mark:
            yield from attempt(sink, LLAMA_BEGIN, _first_llama_call(sink))
    else:
        sink.content(space + first)
        if not first:
            return
    while (yield from text_until(sink.content, (LLAMA_BEGIN,))):
        yield from attempt(sink, LLAMA_BEGIN, _first_llama_call(sink))


def _llama_mark() -> Grammar[bool]:
    yield from expect(LLAMA_BEGIN[1:])
    return True


def _first_llama_call(sink: DeltaSink) -> Grammar[None]:
    yield from expect("{", (yield from skip_space()))
    yield from _llama_calls(sink)


def _llama_calls(sink: DeltaSink) -> Grammar[None]:
    yield from call_object(sink)
    while (character := (yield from skip_space())) == ";":
        character = yield from skip_space()
        if not character:
            return
        yield from expect("{", character)
        yield from call_object(sink)
    if character:
        raise Malformed


def mistral(sink: DeltaSink) -> Grammar[None]:
    """Text, and calls after marks."""
    while (yield from text_until(sink.content, (MISTRAL_BEGIN,))):
        yield from attempt(sink, MISTRAL_BEGIN, _mistral_calls(sink))


def _mistral_calls(sink: DeltaSink) -> Grammar[None]:
    first = yield from skip_space()
    if first == "[":
        yield from call_list(sink)
        return
    if not first or first == "{":
        raise Malformed
    rest, mark = yield from word_until((MISTRAL_ARGUMENTS, MISTRAL_ID, "{"), MAX_NAME_CHARS)
    if mark == MISTRAL_ID:
        _, mark = yield from word_until((MISTRAL_ARGUMENTS, "{"), MAX_NAME_CHARS)
    if mark == MISTRAL_ARGUMENTS:
        yield from expect("{", (yield from skip_space()))
    sink.begin_call((first + rest).strip())
    yield from json_object(sink.arguments)


def deepseek_v3(sink: DeltaSink) -> Grammar[None]:
    """Text, and calls; the marks around all calls are passed over."""
    marks = (DEEPSEEK_CALLS, DEEPSEEK_CALL, DEEPSEEK_CALLS_END)
    while mark := (yield from text_until(sink.content, marks)):
        if mark == DEEPSEEK_CALL:
            yield from attempt(sink, DEEPSEEK_CALL, _deepseek_call(sink))


def _deepseek_call(sink: DeltaSink) -> Grammar[None]:
    kind, _ = yield from word_until((DEEPSEEK_SEPARATOR,), MAX_NAME_CHARS)
    first, fence = "", ""
    if kind.strip() == "function":
        first = yield from skip_space()
    if first in ("", "{"):
        name = kind
        if not first:
            first = yield from skip_space()
    else:
        rest, fence = yield from word_until(("```json",), MAX_NAME_CHARS)
        name, first = first + rest, (yield from skip_space())
    yield from expect("{", first)
    sink.begin_call(name.strip())
    yield from json_object(sink.arguments)
    character = yield from skip_space()
    if fence and character == "`":
        yield from expect("```", character)
        character = yield from skip_space()
    if character:
        yield from expect(DEEPSEEK_CALL_END, character)
