"""gpt-oss (the harmony format): messages, each with a channel and perhaps a recipient.

<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
<|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}<|call|>

The recipient may stand behind the role, on any channel, and without `functions.`; the word `json`
may be glued to it; a message may end where the next one begins.

Source: OpenAI's description of the harmony response format (cookbook, 2025).
"""

from __future__ import annotations

import re

from ferryman.text.tool_calls.call_object import Names
from ferryman.text.tool_calls.deltas import DeltaSink
from ferryman.text.tool_calls.grammar import (
    Emit,
    Grammar,
    Malformed,
    attempt,
    skip_space,
    text_until,
    word_until,
)
from ferryman.text.tool_calls.json_text import json_object
from ferryman.text.tool_calls.thought import PromptTail
from ferryman.text.tool_calls.value_types import Parameters

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN = "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
SPECIAL = frozenset({START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS})
MAX_HEADER_CHARS = 512
_BEGINS = (START, CHANNEL)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_ROLE = re.compile(r"<\|start\|>\s*assistant\b")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS, _GLUED = "functions.", ("json", "code")
# The prompt ends with the role: a recipient may follow it at once.
_RECIPIENT_FIRST = " to="


def openai(sink: DeltaSink, parameters: Parameters, prompt: PromptTail) -> Grammar[None]:
    """Thoughts are on the channel `analysis`, everything else without a recipient is content. A
    text that has no header is content too, or of the message that the prompt has begun."""
    names, open_message = parameters.keys(), prompt.continued
    goes_on_thinking = open_message is not None and open_message.is_thought
    emit: Emit = sink.reasoning if goes_on_thinking else sink.content
    following = None if open_message else (yield from _recipient_first(sink, names))
    marks, last = (*_BEGINS, *ENDS), emit if goes_on_thinking else sink.beginning
    while mark := (yield from text_until(emit, marks, following, last)):
        emit, last, following = sink.content, sink.beginning, None
        if mark in ENDS:
            continue
        header = yield from attempt(sink, mark, _header(mark))
        if header is not None:
            name = _function(header, names)
            emit = sink.content if name else _emit(sink, header)
            last = emit if emit == sink.reasoning else sink.beginning
            following = (yield from attempt(sink, "", _call(sink, name))) if name else None


def _recipient_first(sink: DeltaSink, names: Names) -> Grammar[str | None]:
    """A first message whose header begins with its recipient. Returns what follows."""
    held = ""
    while held != _RECIPIENT_FIRST:
        character = yield
        if not character or not _RECIPIENT_FIRST.startswith(held + character):
            (sink.content if character else sink.beginning)(held)
            return character
        held += character
    header = yield from attempt(sink, held, _header(held))
    name = _function(header or "", names)
    return (yield from attempt(sink, "", _call(sink, name))) if name else None


def _header(first: str) -> Grammar[str]:
    """A header, up to the mark of its message. Malformed for one that is none."""
    header, mark = yield from word_until((MESSAGE, START, *ENDS), MAX_HEADER_CHARS)
    header = first + header
    if mark != MESSAGE or not any(word.search(header) for word in (_CHANNEL, _ROLE, _RECIPIENT)):
        raise Malformed
    return header


def _function(header: str, names: Names) -> str:
    """The function that a message is for; empty when it is for none."""
    match = _RECIPIENT.search(header)
    if match is None:
        return ""
    name = match[1].removeprefix(_FUNCTIONS)
    glued = [name.removesuffix(word) for word in _GLUED if name.endswith(word)]
    offered = next((spelling for spelling in (name, *glued) if spelling in names), "")
    return offered or (name if match[1].startswith(_FUNCTIONS) else "")


def _emit(sink: DeltaSink, header: str) -> Emit:
    channel = _CHANNEL.search(header)
    # A message to a tool that the caller did not give is nothing to read.
    is_thought = channel is not None and channel[1] == "analysis"
    return sink.reasoning if is_thought or _RECIPIENT.search(header) else sink.content


def _call(sink: DeltaSink, name: str) -> Grammar[str]:
    """The arguments, an object or nothing. Returns what follows, a character or a mark."""
    first = yield from skip_space()
    if first == "{":
        sink.begin_call(name)
        yield from json_object(sink.arguments)
        return (yield from skip_space())
    if not first and sink.is_cut:
        return ""
    mark = first and (yield from word_until((*ENDS, *_BEGINS), 0, first))[1]
    sink.begin_call(name)
    sink.arguments("{}")
    return mark
