"""gpt-oss (the harmony format): messages, each with a channel and perhaps a recipient.

<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
<|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}<|call|>

Source: OpenAI's description of the harmony response format (cookbook, 2025).
"""

from __future__ import annotations

import re

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

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN = "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
SPECIAL = frozenset({START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS})
MAX_HEADER_CHARS = 512
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."


def openai(sink: DeltaSink) -> Grammar[None]:
    """Thoughts are on the channel `analysis`, everything else without a recipient is content. A
    text that has no header is content too."""
    while first := (yield):
        begins_header = first in (START[0], " ")
        header = (yield from attempt(sink, first, _header(first))) if begins_header else None
        if header is None:
            if not begins_header:
                sink.content(first)
            yield from text_until(sink.content, ENDS)
        elif name := _function(header):
            yield from attempt(sink, "", _call(sink, name))
        else:
            yield from text_until(_emit(sink, header), ENDS)


def _header(first: str) -> Grammar[str]:
    header, _ = yield from word_until((MESSAGE,), MAX_HEADER_CHARS)
    if not _CHANNEL.search(first + header):
        raise Malformed
    return first + header


def _function(header: str) -> str:
    """The function that a message is for; empty when it is for none."""
    match = _RECIPIENT.search(header)
    if match is None or not match[1].startswith(_FUNCTIONS):
        return ""
    return match[1].removeprefix(_FUNCTIONS)


def _emit(sink: DeltaSink, header: str) -> Emit:
    channel = _CHANNEL.search(header)
    # A message to a tool that the caller did not give is nothing to read.
    is_thought = channel is not None and channel[1] == "analysis"
    return sink.reasoning if is_thought or _RECIPIENT.search(header) else sink.content


def _call(sink: DeltaSink, name: str) -> Grammar[None]:
    if (yield from skip_space()) != "{":
        raise Malformed
    sink.begin_call(name)
    yield from json_object(sink.arguments)
    yield from text_until(lambda _: None, ENDS)
