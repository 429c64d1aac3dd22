"""MiniMax M2, and DeepSeek V3.2 and V4: tags whose attributes name the call and each argument.

<minimax:tool_call><invoke name="f"><parameter name="key">value</parameter></invoke>
</minimax:tool_call>

DeepSeek has its word in each tag, `<｜DSML｜invoke name="f">`, and says beside a parameter's name
whether it is a text: `string="false"`. The schema of the tool decides the rest. Models leave the
outer tags out at times, or a word, or an end; some write JSON between the tags.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from ferryman.text.tool_calls.call_object import TOOL_NAME, calls
from ferryman.text.tool_calls.deltas import DeltaSink
from ferryman.text.tool_calls.grammar import Emit, Grammar, Malformed, marked_text
from ferryman.text.tool_calls.json_text import TextBuffer, json_object
from ferryman.text.tool_calls.tags.arguments import TaggedArguments, ValueEnd
from ferryman.text.tool_calls.tags.value_text import (
    ValueEnds,
    lined_value_text,
    tag_behind,
    value_text,
)
from ferryman.text.tool_calls.value_types import NO_STRINGS, STRING, Parameters

DSML = "｜DSML｜"
MINIMAX_BEGIN, MINIMAX_END = "<minimax:tool_call>", "</minimax:tool_call>"
MAX_ATTRIBUTES_CHARS = 512
_ATTRIBUTE = r"""(?:\b{}\s*|^\s*)=\s*(?:"([^"]*)"|'([^']*)'|["']?([^"'>/\s]+))"""
_NAMED, _IS_STRING = (re.compile(_ATTRIBUTE.format(word)) for word in ("name", "string"))

ReadText = Callable[[DeltaSink, ValueEnds, str | None, Emit], Grammar[ValueEnd]]


@dataclass(frozen=True)
class InvokeTags:
    """The tags of a model: the outer ones, the word that the others begin with, and the reader of
    the values that it writes."""

    begins: tuple[str, ...]
    word: str
    read: ReadText

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """The ends of the outer tags."""
        return tuple(f"</{begin[1:]}" for begin in self.begins)

    @cached_property
    def invokes(self) -> tuple[str, ...]:
        """Tags that begin a call, with their word and without."""
        return tuple(dict.fromkeys((f"<{self.word}invoke", "<invoke")))

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Tags that begin a parameter."""
        return tuple(dict.fromkeys((f"<{self.word}parameter", "<parameter")))

    @cached_property
    def invoke_end(self) -> str:
        return f"</{self.word}invoke>"

    @cached_property
    def parameter_end(self) -> str:
        return f"</{self.word}parameter>"

    @cached_property
    def all(self) -> tuple[str, ...]:
        """All tags that may follow one another."""
        inner = (*self.parameters, self.parameter_end, self.invoke_end, *self.invokes)
        return (*inner, *self.ends, *self.begins)

    @cached_property
    def value_ends(self) -> ValueEnds:
        """A value ends at its own tag; where that is missing, at one of a call that ends there."""
        after_call = (*self.ends, *self.invokes, *self.begins)
        return {
            self.parameter_end: self.all,
            f"\n{self.parameters[0]}": (),
            **dict.fromkeys((self.invoke_end, f"\n{self.invoke_end}"), after_call),
            **{f"{line}{end}": self.begins for line in ("", "\n") for end in self.ends},
        }


MINIMAX = InvokeTags((MINIMAX_BEGIN, "<tool_calls>"), "", lined_value_text)
DEEPSEEK = InvokeTags((f"<{DSML}function_calls>", f"<{DSML}tool_calls>"), DSML, value_text)


def minimax_m2(sink: DeltaSink, parameters: Parameters) -> Grammar[None]:
    """Text, and calls between tags."""
    return _tagged_calls(sink, parameters, MINIMAX)


def deepseek_v32(sink: DeltaSink, parameters: Parameters) -> Grammar[None]:
    """Text, and calls between tags."""
    return _tagged_calls(sink, parameters, DEEPSEEK)


def _tagged_calls(sink: DeltaSink, parameters: Parameters, tags: InvokeTags) -> Grammar[None]:
    invocations = _Invocations(sink, parameters, tags)
    openings = dict.fromkeys(tags.begins, invocations.section)
    # Without the outer tags a call is one of a tool that was offered.
    openings |= dict.fromkeys(tags.invokes, partial(invocations.read, parameters.keys()))
    yield from marked_text(sink, openings, (tags.invoke_end, *tags.ends))


class _Invocations:
    """The calls in an answer."""

    def __init__(self, sink: DeltaSink, parameters: Parameters, tags: InvokeTags) -> None:
        self._sink, self._parameters, self._tags = sink, parameters, tags

    def section(self) -> Grammar[str]:
        """The calls behind an outer tag, or objects that are calls. Returns what follows."""
        _, tag = yield from tag_behind((*self._tags.invokes, "{", "["))
        if tag in ("{", "["):
            return (yield from calls(self._sink, tag))
        if tag not in self._tags.invokes:
            raise Malformed
        return (yield from self.read(None))

    def read(self, names: Collection[str] | None) -> Grammar[str]:
        """Calls, of which the first tag was read up to its attributes; of any names where `names`
        is None. Returns what follows, a tag or other text."""
        tag = yield from self._call(names)
        while tag in self._tags.invokes:
            tag = yield from self._call(names)
        return tag

    def _call(self, names: Collection[str] | None) -> Grammar[str]:
        """A call that begins when a tag or an object follows its own. Returns what follows it."""
        attributes = yield from _attributes()
        name = _value_of(_NAMED, attributes or "")
        if not TOOL_NAME.fullmatch(name) or (names is not None and name not in names):
            raise Malformed
        arguments = TaggedArguments(self._sink, self._parameters.get(name, {}), self._tags.all)
        if (attributes or "").rstrip().endswith("/"):
            self._sink.begin_call(name)
            arguments.close()
            return (yield from self._behind_call())
        _, tag = yield from tag_behind((*self._tags.all, "{"))
        is_over = not tag and not self._sink.is_cut
        if not is_over and tag not in (*self._tags.all, "{"):
            raise Malformed
        self._sink.begin_call(name)
        if tag == "{":
            yield from json_object(self._sink.arguments)
            return (yield from self._behind_call())
        return (yield from self._arguments(arguments, tag))

    def _behind_call(self) -> Grammar[str]:
        """The tag behind a call, the one of its own end left out; or other text."""
        _, tag = yield from tag_behind(self._tags.all)
        while tag in (self._tags.invoke_end, self._tags.parameter_end):
            _, tag = yield from tag_behind(self._tags.all)
        return tag

    def _arguments(self, arguments: TaggedArguments, tag: str) -> Grammar[str]:
        """All of them, from the first tag on."""
        while tag in (*self._tags.parameters, self._tags.parameter_end):
            if tag == self._tags.parameter_end:
                tag = yield from arguments.beside(self._tags.all)
            else:
                tag = yield from self._parameter(arguments)
        if not tag:
            return arguments.at_end_of_text()
        arguments.close()
        return (yield from self._behind_call()) if tag == self._tags.invoke_end else tag

    def _parameter(self, arguments: TaggedArguments) -> Grammar[str]:
        """A name and its value; returns the tag that follows, empty at the end of the text."""
        attributes = yield from _attributes()
        if attributes is None:
            return ""
        name = _value_of(_NAMED, attributes)
        types = _types(arguments, name, _value_of(_IS_STRING, attributes))
        read = partial(self._tags.read, self._sink, self._tags.value_ends, None)
        return (yield from arguments.argument(name, types, read))


def _attributes() -> Grammar[str | None]:
    """The rest of a tag. A line's end ends it, too, where a bracket or a quote is missing. None
    where the text ends before that."""
    text = TextBuffer(MAX_ATTRIBUTES_CHARS)
    is_quoted = False
    while character := (yield):
        if character == "\n" or (character == ">" and not is_quoted):
            return text.text
        is_quoted ^= character == '"'
        text.add(character)
    return None


def _value_of(attribute: re.Pattern[str], attributes: str) -> str:
    """Empty where there is none."""
    match = attribute.search(attributes)
    return next(filter(None, match.groups()), "") if match else ""


def _types(arguments: TaggedArguments, name: str, is_string: str) -> Sequence[str]:
    """The types of a value by its schema, and by what the model says of it."""
    types = arguments.types(name, NO_STRINGS if is_string == "false" else STRING)
    if is_string == "true" and "string" in types:
        return STRING
    if is_string == "false":
        return [kind for kind in types if kind != "string"] or types
    return types
