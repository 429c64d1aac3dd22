"""Calls whose arguments stand between tags, as grammars in Lark (`call_forms.py`)."""

from __future__ import annotations

from ferryman.text.tool_calls.call_forms import CallWords, lines, literal
from ferryman.text.tool_calls.tags import glm45 as glm
from ferryman.text.tool_calls.tags import invoke
from ferryman.text.tool_calls.tags import qwen3_coder as qwen

# Bounds that the parsers have, or that keep a text from never ending.
_KEY = "[A-Za-z_][A-Za-z0-9_.-]{0,63}"


def _text_before(end: str) -> str:
    """The rule of a text that ends with a mark, as it stands in a grammar: a control token, which
    is no text, or text."""
    if end.startswith("<["):
        return rf"value: /(.|\n)*/ {end}"
    return rf"value[suffix={end}]: /(.|\n)*/"


def qwen3_coder(words: CallWords) -> str:
    """Parameters between tags, each with a text that ends before its closing tag."""
    begin, end = words.mark(qwen.BEGIN), words.mark(qwen.END)
    return lines(
        r'start: call ("\n" call)*',
        rf'call: {begin} "\n<function=" name ">\n" parameter* "</function>\n" {end}',
        rf'parameter: "<parameter=" /{_KEY}/ ">\n" value "\n"',
        _text_before('"</parameter>"'),
        words.name_rule,
    )


def seed_oss(words: CallWords) -> str:
    """The same between other marks, without line breaks around a value."""
    begin, end = words.mark(qwen.SEED_BEGIN), words.mark(qwen.SEED_END)
    return lines(
        r'start: call ("\n"+ call)*',
        rf'call: {begin} "\n<function=" name ">\n" parameter* "</function>\n" {end}',
        rf'parameter: "<parameter=" /{_KEY}/ ">" value "\n"',
        _text_before('"</parameter>"'),
        words.name_rule,
    )


def glm45(words: CallWords) -> str:
    """Keys and values between tags, on one line or on lines of their own."""
    begin, end, key, key_end, value, value_end = (
        words.mark(tag)
        for tag in (glm.BEGIN, glm.END, glm.KEY, glm.KEY_END, glm.VALUE, glm.VALUE_END)
    )
    return lines(
        r'start: call ("\n" call)*',
        rf'call: {begin} name "\n"? pair* {end}',
        rf'pair: {key} /{_KEY}/ {key_end} "\n"? {value} value "\n"?',
        _text_before(value_end),
        words.name_rule,
    )


def minimax_m2(words: CallWords) -> str:
    """One section of calls, whose tags have names as attributes."""
    begin, end = words.mark(invoke.MINIMAX_BEGIN), words.mark(invoke.MINIMAX_END)
    return lines(
        rf'start: {begin} "\n" call+ {end}',
        r'call: "<invoke name=\"" name "\">\n" parameter* "</invoke>\n"',
        rf'parameter: "<parameter name=\"" /{_KEY}/ "\">" value "\n"',
        _text_before('"</parameter>"'),
        words.name_rule,
    )


def deepseek_v32(words: CallWords) -> str:
    """The same with a word in each tag, and what each value is."""
    word = words.mark(invoke.DSML)
    # A control token is no text: the value's text goes on up to it, with the tag's first letters.
    value = rf'value: /(.|\n)*<\// {word} "parameter>"'
    if not word.startswith("<["):
        value = _text_before(literal(f"</{invoke.DSML}parameter>"))
    return lines(
        rf'start: "<" {word} section ">\n" call+ "</" {word} section ">"',
        'section: "function_calls" | "tool_calls"',
        rf'call: "<" {word} "invoke name=\"" name "\">\n" parameter* "</" {word} "invoke>\n"',
        rf'parameter: "<" {word} "parameter name=\"" /{_KEY}/ kind value "\n"',
        r'kind: "\" string=\"true\">" | "\" string=\"false\">"',
        value,
        words.name_rule,
    )
