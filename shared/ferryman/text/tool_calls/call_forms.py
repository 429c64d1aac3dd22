"""Calls as each format writes them, as grammars in Lark: for an answer that is either a call or of
a form that the caller prescribes.

The names are those of the tools. The arguments are any object, as they are where nothing is
prescribed: a model that may call is told the schemas, and held to none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ferryman.schedule.schemas.json_schema import JSON_STYLE
from ferryman.text.tool_calls import gemma4 as gemma
from ferryman.text.tool_calls import json_calls, openai
from ferryman.text.tool_calls import kimi_k2 as kimi
from ferryman.text.tool_calls.python import pythonic as python


@dataclass(frozen=True, slots=True)
class CallWords:
    """The words of calls: the tools' `names`, and `mark`, which gives a mark of the format as it
    stands in a grammar: a control token, or text."""

    names: Sequence[str]
    mark: Callable[[str], str]

    @property
    def name_rule(self) -> str:
        return "name: " + " | ".join(map(literal, self.names))


CallForm = Callable[[CallWords], str]


def literal(text: str) -> str:
    """A text in Lark."""
    return json.dumps(text, ensure_ascii=False)


def lines(*rules: str) -> str:
    """A grammar of these rules."""
    return "\n".join(rules) + "\n"


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": JSON_STYLE})


ARGUMENTS = "args: " + _json({"type": "object"})


def _object(words: CallWords, arguments: str) -> str:
    """The rule of `{"name": …, "arguments": {…}}` with its fields in either order, of which the
    second goes by this name. It is JSON of a schema: as text it could not be told from another
    object that begins alike."""
    fields = {"name": {"enum": list(words.names)}, arguments: {"type": "object"}}
    orders = (tuple(fields), tuple(reversed(fields)))
    objects = (
        {
            "type": "object",
            "properties": {name: fields[name] for name in order},
            "required": list(order),
            "additionalProperties": False,
        }
        for order in orders
    )
    return "object: " + " | ".join(map(_json, objects))


def hermes(words: CallWords) -> str:
    """Calls between marks, each on lines of its own."""
    begin, end = words.mark(json_calls.HERMES_BEGIN), words.mark(json_calls.HERMES_END)
    return lines(
        r'start: call ("\n" call)*',
        rf'call: {begin} "\n"? object "\n"? {end}',
        _object(words, "arguments"),
    )


def granite(words: CallWords) -> str:
    """A list of calls after a mark, which is a word where a tokenizer has no such token."""
    marks = " | ".join(map(words.mark, json_calls.GRANITE_MARKS))
    return lines(f"start: mark {_LIST}", f"mark: {marks}", _object(words, "arguments"))


_LIST = '" "? "[" object (", " object)* "]"'


def mistral(words: CallWords) -> str:
    """A list of calls after a mark, or a mark before each call."""
    begin, call_id = words.mark(json_calls.MISTRAL_BEGIN), words.mark(json_calls.MISTRAL_ID)
    arguments = words.mark(json_calls.MISTRAL_ARGUMENTS)
    return lines(
        f"start: {begin} {_LIST} | call+",
        f"call: {begin} name ({call_id} /[A-Za-z0-9]{{9}}/)? {arguments}? args",
        _object(words, "arguments"),
        words.name_rule,
        ARGUMENTS,
    )


def llama3_json(words: CallWords) -> str:
    """Calls without a mark, or behind the one of newer models."""
    return lines(
        f'start: {words.mark(json_calls.LLAMA_BEGIN)}? object ("; " object)*',
        _object(words, "parameters"),
    )


def deepseek_v3(words: CallWords) -> str:
    """Calls between marks, in the form of V3 and R1 or the one since V3.1."""
    mark = words.mark
    begin, end = mark(json_calls.DEEPSEEK_CALL), mark(json_calls.DEEPSEEK_CALL_END)
    separator = mark(json_calls.DEEPSEEK_SEPARATOR)
    fenced = rf'"function" {separator} name "\n```json\n" args "\n```"'
    return lines(
        rf'start: {mark(json_calls.DEEPSEEK_CALLS)} call ("\n"? call)*'
        f" {mark(json_calls.DEEPSEEK_CALLS_END)}",
        f"call: {begin} ({fenced} | name {separator} args) {end}",
        words.name_rule,
        ARGUMENTS,
    )


def kimi_k2(words: CallWords) -> str:
    """A section of calls, each with the tool's name in an id."""
    section, section_end, call, call_end, arguments = (
        words.mark(mark)
        for mark in (kimi.SECTION, kimi.SECTION_END, kimi.CALL, kimi.CALL_END, kimi.ARGUMENTS)
    )
    return lines(
        f"start: {section} call+ {section_end}",
        f'call: {call} "functions." name /:[0-9]{{1,6}}/ {arguments} args {call_end}',
        words.name_rule,
        ARGUMENTS,
    )


def gemma4(words: CallWords) -> str:
    """A word, and members whose keys have no quotes; a text stands between marks."""
    begin, end, quote = words.mark(gemma.BEGIN), words.mark(gemma.END), words.mark(gemma.QUOTE)
    is_token = quote.startswith("<[")
    return lines(
        "start: call+",
        f'call: {begin} "call:" name "{{" members? "}}" {end}',
        'members: member ("," member)*',
        'member: KEY ":" value',
        'value: string | NUMBER | "true" | "false" | "null"'
        ' | "[" (value ("," value)*)? "]" | "{" members? "}"',
        f"string: {quote} text",
        rf"text: /(.|\n)*/ {quote}" if is_token else rf"text[suffix={quote}]: /(.|\n)*/",
        r"KEY: /[A-Za-z_][A-Za-z0-9_]{0,63}/",
        r"NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?/",
        words.name_rule,
    )


def harmony(words: CallWords) -> str:
    """One call in the channel for them: of gpt-oss, whose answers end with it."""
    channel, message = words.mark(openai.CHANNEL), words.mark("<|message|>")
    constrain = words.mark("<|constrain|>")
    return lines(
        f'start: receiver (" "? {constrain} "json" | " json") {message} args',
        f'receiver: {channel} "commentary to=functions." name'
        f' | " to=functions." name {channel} "commentary"',
        words.name_rule,
        ARGUMENTS,
    )


def pythonic(words: CallWords) -> str:
    """A list of calls in Python, alone or in a block of code."""
    return _python_calls(words, r'start: list | "```tool_code\n" list "\n```"', _LIST_OF_CALLS)


def lfm2(words: CallWords) -> str:
    """A list of calls in Python between marks."""
    begin, end = words.mark(python.LFM_BEGIN), words.mark(python.LFM_END)
    return _python_calls(words, f"start: {begin} list {end}", _LIST_OF_CALLS)


def olmo3(words: CallWords) -> str:
    """Calls in Python on lines between marks."""
    begin, end = words.mark(python.OLMO_BEGIN), words.mark(python.OLMO_END)
    return _python_calls(words, rf'start: {begin} "\n"? call ("\n" call)* "\n"? {end}')


_LIST_OF_CALLS = 'list: "[" call (", " call)* "]"'


def _python_calls(words: CallWords, *rules: str) -> str:
    return lines(
        *rules,
        'call: name "(" (argument (", " argument)*)? ")"',
        'argument: KEY "=" value',
        'value: STRING | NUMBER | "True" | "False" | "None"'
        ' | "[" (value (", " value)*)? "]" | "{" (pair (", " pair)*)? "}"',
        'pair: STRING ": " value',
        r"KEY: /[A-Za-z_][A-Za-z0-9_]{0,63}/",
        r"""STRING: /"([^"\\\x00-\x1f]|\\["'\\n])*"/ | /'([^'\\\x00-\x1f]|\\["'\\n])*'/""",
        r"NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?/",
        words.name_rule,
    )
