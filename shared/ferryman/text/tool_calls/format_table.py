"""The formats by their names, which are vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ferryman.text.tool_calls import call_forms, gemma4, json_calls, kimi_k2, openai
from ferryman.text.tool_calls.call_forms import CallForm
from ferryman.text.tool_calls.call_ids import CallSource, kimi_id, mistral_id, openai_id
from ferryman.text.tool_calls.deltas import DeltaSink
from ferryman.text.tool_calls.grammar import Grammar
from ferryman.text.tool_calls.python import pythonic as python_calls
from ferryman.text.tool_calls.tags import glm45, invoke, tag_forms
from ferryman.text.tool_calls.tags import qwen3_coder as qwen
from ferryman.text.tool_calls.thought import PromptTail, ThoughtMarks
from ferryman.text.tool_calls.value_types import Parameters

NO_TOKENS: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format of calls. `special` are the control tokens that it needs to see, `signs` what a
    chat template has in it that asks for it. `form` is the grammar of an answer that is calls and
    nothing else. `call_id` makes a call's id."""

    make: Callable[[DeltaSink, Parameters, PromptTail], Grammar[None]]
    special: frozenset[str]
    signs: tuple[str, ...]
    form: CallForm
    call_id: Callable[[CallSource], str] = openai_id


def _calls(
    grammar: Callable[[DeltaSink, Parameters], Grammar[None]],
) -> Callable[[DeltaSink, Parameters, PromptTail], Grammar[None]]:
    """A format that begins alike behind any prompt."""
    return lambda sink, parameters, prompt: grammar(sink, parameters)


# If a template has the signs of several, it means the first.
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "openai": ToolFormat(openai.openai, openai.SPECIAL, (openai.CHANNEL,), call_forms.harmony),
    "seed_oss": ToolFormat(
        _calls(qwen.seed_oss),
        frozenset({qwen.SEED_BEGIN, qwen.SEED_END}),
        (qwen.SEED_BEGIN,),
        tag_forms.seed_oss,
    ),
    "minimax_m2": ToolFormat(
        _calls(invoke.minimax_m2),
        frozenset({invoke.MINIMAX_BEGIN, invoke.MINIMAX_END}),
        (invoke.MINIMAX_BEGIN,),
        tag_forms.minimax_m2,
    ),
    "deepseek_v32": ToolFormat(
        _calls(invoke.deepseek_v32),
        frozenset({invoke.DSML}),
        (invoke.DSML,),
        tag_forms.deepseek_v32,
    ),
    "glm45": ToolFormat(_calls(glm45.glm45), glm45.SPECIAL, (glm45.KEY,), tag_forms.glm45),
    "kimi_k2": ToolFormat(
        _calls(kimi_k2.kimi_k2),
        kimi_k2.SPECIAL,
        (kimi_k2.ARGUMENTS,),
        call_forms.kimi_k2,
        kimi_id,
    ),
    "gemma4": ToolFormat(_calls(gemma4.gemma4), gemma4.SPECIAL, (gemma4.BEGIN,), call_forms.gemma4),
    "qwen3_coder": ToolFormat(
        _calls(qwen.qwen3_coder), NO_TOKENS, ("<function=",), tag_forms.qwen3_coder
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
        _calls(json_calls.mistral),
        frozenset({json_calls.MISTRAL_BEGIN, json_calls.MISTRAL_ID, json_calls.MISTRAL_ARGUMENTS}),
        (json_calls.MISTRAL_BEGIN,),
        call_forms.mistral,
        mistral_id,
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
    "lfm2": ToolFormat(
        _calls(python_calls.lfm2),
        frozenset({python_calls.LFM_BEGIN, python_calls.LFM_END}),
        (python_calls.LFM_BEGIN, "<|tool_list_start|>", "List of tools: ["),
        call_forms.lfm2,
    ),
    "olmo3": ToolFormat(
        _calls(python_calls.olmo3),
        frozenset({python_calls.OLMO_BEGIN, python_calls.OLMO_END}),
        (python_calls.OLMO_BEGIN,),
        call_forms.olmo3,
    ),
    "pythonic": ToolFormat(
        _calls(python_calls.pythonic),
        NO_TOKENS,
        ("[func_name1(", "```tool_code"),
        call_forms.pythonic,
    ),
}
# Other names of vLLM for the same.
TOOL_ALIASES = {
    "qwen3_xml": "qwen3_coder",
    "glm47": "glm45",
    "glm4_moe": "glm45",
    "deepseek_v31": "deepseek_v3",
    "deepseek_v4": "deepseek_v32",
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
    "seed_oss": ReasoningFormat(
        ThoughtMarks(("<seed:think>", "<seed:think><seed:cot_budget_reflect>"), ("</seed:think>",)),
        frozenset({"<seed:think>", "</seed:think>"}),
        ("<seed:think>",),
    ),
    "gemma4": ReasoningFormat(
        ThoughtMarks(("<|channel>thought",), ("<channel|>",)),
        frozenset({"<|channel>", "<channel|>"}),
        ("<|channel>thought",),
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
