"""The formats of one model, by names or by its chat template, and the parser of an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ferryman.errors import ConfigError
from ferryman.text.tool_calls import forced_calls, openai
from ferryman.text.tool_calls.deltas import DeltaSink
from ferryman.text.tool_calls.format_table import (
    NO_TOKENS,
    REASONING_FORMATS,
    TOOL_ALIASES,
    TOOL_FORMATS,
    ReasoningFormat,
    ToolFormat,
)
from ferryman.text.tool_calls.free_text import free_text_call
from ferryman.text.tool_calls.grammar import (
    Grammar,
    KnownCallsSink,
    OutputParser,
    content,
)
from ferryman.text.tool_calls.thought import PromptTail, thought_then
from ferryman.text.tool_calls.value_types import Parameters

AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class NoTools:
    """The request has no tools, or wants none called."""


@dataclass(frozen=True, slots=True)
class FreeTools:
    """The model may call tools; `parameters` are their schemas."""

    parameters: Parameters


@dataclass(frozen=True, slots=True)
class FormAlone(NoTools):
    """The answer has a form that the request prescribes, from its first token on."""


@dataclass(frozen=True, slots=True)
class FormOrCall(FreeTools):
    """The answer has a form that the request prescribes, or is a call of one of the tools."""


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The model has to call this tool."""

    name: str


@dataclass(frozen=True, slots=True)
class FreeTextTool:
    """The answer is the text of the only parameter of this tool, and nothing else."""

    name: str
    parameter: str


@dataclass(frozen=True, slots=True)
class SomeTool:
    """The model has to call some tool."""


ToolUse = NoTools | FreeTools | NamedTool | FreeTextTool | SomeTool


@dataclass(frozen=True, slots=True)
class OutputSyntax:
    """The formats of one model."""

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None

    @classmethod
    def chosen(cls, tools: str, reasoning: str, chat_template: str) -> OutputSyntax:
        """The formats by name; `auto` looks into the chat template. Raises ConfigError for unknown
        names."""
        tools = TOOL_ALIASES.get(tools, tools)
        return cls(
            _choice("--tool-parser", tools, TOOL_FORMATS, chat_template),
            _choice("--reasoning-parser", reasoning, REASONING_FORMATS, chat_template),
        )

    def special(self, use: ToolUse) -> frozenset[str]:
        """The control tokens that have to be in the text of an answer."""
        names = self.reasoning.special if self.reasoning else NO_TOKENS
        return names | (
            self.tools.special if self.tools and isinstance(use, FreeTools) else NO_TOKENS
        )

    def reads(self, use: ToolUse) -> bool:
        """Whether an answer may hold anything but content."""
        return self.reasoning is not None or not isinstance(use, NoTools)

    def parser(self, use: ToolUse, prompt: PromptTail) -> OutputParser:
        """For one answer to a prompt that ends so."""
        first = prompt.first_number
        if isinstance(use, FormOrCall):
            sink: DeltaSink = KnownCallsSink(use.parameters, first)
        else:
            sink = DeltaSink(first)
        return OutputParser(partial(self._grammar, use, prompt), sink)

    def _grammar(self, use: ToolUse, prompt: PromptTail, sink: DeltaSink) -> Grammar[None]:
        rest = partial(self._call_grammar, use, prompt)
        if self.reasoning is None or self.reasoning.marks is None or _is_forced(use):
            return rest(sink)
        marks = self.reasoning.marks
        if isinstance(use, FormAlone | FormOrCall):
            # A form begins with the answer: it is no thought, though the prompt may have begun one.
            prompt = PromptTail(marks.ends[0])
        can_call = isinstance(use, FreeTools) and self.tools is not None
        return thought_then(sink, marks, rest, prompt, rest if can_call else None)

    def _call_grammar(self, use: ToolUse, prompt: PromptTail, sink: DeltaSink) -> Grammar[None]:
        match use:
            case NamedTool(name):
                return forced_calls.named_call(sink, name)
            case FreeTextTool(name, parameter):
                return free_text_call(sink, name, parameter)
            case SomeTool():
                return forced_calls.required_calls(sink)
            case FreeTools(parameters) if self.tools is not None:
                return self.tools.make(sink, parameters, prompt)
        if self.reasoning is not None and self.reasoning.marks is None:
            return openai.openai(sink, {}, prompt)
        return content(sink)


def _is_forced(use: ToolUse) -> bool:
    """The grammar of a forced call leaves no room for a thought."""
    return isinstance(use, NamedTool | FreeTextTool | SomeTool)


F = TypeVar("F", ToolFormat, ReasoningFormat)


def _choice(flag: str, name: str, formats: Mapping[str, F], chat_template: str) -> F | None:
    if name == NONE:
        return None
    if name != AUTO:
        if name not in formats:
            raise ConfigError(
                f"{flag} {name}: it should be one of auto, none, {', '.join(formats)}"
            )
        return formats[name]
    signed = (
        form for form in formats.values() if any(sign in chat_template for sign in form.signs)
    )
    return next(signed, None)
