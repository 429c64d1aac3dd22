"""The formats by their names, which are vLLM's, and the choice for a model by its chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ferryman.errors import ConfigError
from ferryman.text.tool_calls import call_forms, forced_calls, json_calls, openai
from ferryman.text.tool_calls.call_forms import CallForm
from ferryman.text.tool_calls.deltas import DeltaSink
from ferryman.text.tool_calls.free_text import free_text_call
from ferryman.text.tool_calls.grammar import (
    Grammar,
    KnownCallsSink,
    OutputParser,
    content,
)
from ferryman.text.tool_calls.pythonic import pythonic
from ferryman.text.tool_calls.tags import glm45, tag_forms
from ferryman.text.tool_calls.tags.qwen3_coder import qwen3_coder
from ferryman.text.tool_calls.thought import PromptTail, ThoughtMarks, thought_then
from ferryman.text.tool_calls.value_types import Parameters

AUTO, NONE = "auto", "none"
NO_TOKENS: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format of calls. `special` are the control tokens that it needs to see, `signs` what a
    chat template has in it that asks for it. `form` is the grammar of an answer that is calls and
    nothing else. `call_id` makes a call's name from hex digits."""

    make: Callable[[DeltaSink, Parameters, PromptTail], Grammar[None]]
    special: frozenset[str]
    signs: tuple[str, ...]
    form: CallForm
    call_id: Callable[[str], str] = "call_{:.24}".format


def _calls(
    grammar: Callable[[DeltaSink, Parameters], Grammar[None]],
) -> Callable[[DeltaSink, Parameters, PromptTail], Grammar[None]]:
    """A format that begins alike behind any prompt."""
    return lambda sink, parameters, prompt: grammar(sink, parameters)


# If a template has the signs of several, it means the first.
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "openai": ToolFormat(openai.openai, openai.SPECIAL, (openai.CHANNEL,), call_forms.harmony),
    "glm45": ToolFormat(_calls(glm45.glm45), glm45.SPECIAL, (glm45.KEY,), tag_forms.glm45),
    "qwen3_coder": ToolFormat(
        _calls(qwen3_coder), NO_TOKENS, ("<function=",), tag_forms.qwen3_coder
    ),
    "deepseek_v3": ToolFormat(
        _calls(json_calls.deepseek_v3),
        frozenset(
            {
                json_calls.DEEPSEEK_CALLS,
                json_calls.DEEPSEEK_CALLS_END,
                json_calls.DEEPSEEK_CALL,
                json_calls.DEEPSEEK_CALL_END,
                json_calls.DEEPSEEK_SEPARATOR,
            }
        ),
        (json_calls.DEEPSEEK_CALL,),
        call_forms.deepseek_v3,
    ),
    "mistral": ToolFormat(
        # Its templates take ids of nine characters, and no others.
        _calls(json_calls.mistral),
        frozenset({json_calls.MISTRAL_BEGIN, json_calls.MISTRAL_ID, json_calls.MISTRAL_ARGUMENTS}),
        (json_calls.MISTRAL_BEGIN,),
        call_forms.mistral,
        "{:.9}".format,
    ),
    "granite": ToolFormat(
        _calls(json_calls.granite),
        frozenset({"<|tool_call|>"}),
        ("<|tool_call|>",),
        call_forms.granite,
    ),
    "hermes": ToolFormat(
        _calls(json_calls.hermes), NO_TOKENS, (json_calls.HERMES_BEGIN,), call_forms.hermes
    ),
    "llama3_json": ToolFormat(
        _calls(json_calls.llama3_json),
        frozenset({json_calls.LLAMA_BEGIN}),
        (json_calls.LLAMA_BEGIN, '"parameters"'),
        call_forms.llama3_json,
    ),
    "pythonic": ToolFormat(
        _calls(pythonic), NO_TOKENS, ("[func_name1(", "```tool_code"), call_forms.pythonic
    ),
}
# Other names of vLLM for the same.
TOOL_ALIASES = {
    "qwen3_xml": "qwen3_coder",
    "glm47": "glm45",
    "glm4_moe": "glm45",
    "deepseek_v31": "deepseek_v3",
    "granite4": "hermes",
    "gemma": "pythonic",
}


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """A format of thoughts. Without `marks` the tool format of the same model reads them."""

    marks: ThoughtMarks | None
    special: frozenset[str]
    signs: tuple[str, ...]


_THINK = ("<think>",), ("</think>",)
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "openai_gptoss": ReasoningFormat(None, openai.SPECIAL, (openai.CHANNEL,)),
    "mistral": ReasoningFormat(
        ThoughtMarks(("[THINK]",), ("[/THINK]",)),
        frozenset({"[THINK]", "[/THINK]"}),
        ("[THINK]",),
    ),
    "granite": ReasoningFormat(
        ThoughtMarks(
            ("Here's my thought process:", "Here is my thought process:"),
            ("Here's my response:", "Here is my response:"),
        ),
        NO_TOKENS,
        ("Here is my thought process:", "Here's my thought process:"),
    ),
    "qwen3": ReasoningFormat(
        ThoughtMarks(*_THINK), frozenset({"<think>", "</think>"}), ("</think>",)
    ),
    "deepseek_r1": ReasoningFormat(
        ThoughtMarks(*_THINK, is_always_open=True), frozenset({"<think>", "</think>"}), ()
    ),
}


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
        sink = KnownCallsSink(use.parameters) if isinstance(use, FormOrCall) else DeltaSink()
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
