"""Compares renderings of chat templates with transformers' own, character by character.

    python tools/compare_templates.py FOLDER        templates are the files *.jinja in it

Published templates are other people's text, so they are not kept here. Each is rendered on
conversations with systems, tools, calls, results, thoughts and documents; a template that refuses
a conversation has to refuse it in both.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from transformers import PreTrainedTokenizerFast

from ferryman.errors import ConfigError, InvalidRequest
from ferryman.text.chat import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_TRANSFORMERS: Any = PreTrainedTokenizerFast(
    tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()), **SPECIAL
)


@dataclass(frozen=True, slots=True)
class SampleChat:
    """Messages, and the variables that go with them."""

    name: str
    messages: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any] = field(default_factory=dict)


def _said(role: str, content: object, **more: object) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


_PLACE = {"type": "string", "description": "A place, such as “Zürich <ZH>”"}
_SCHEMA = {"type": "object", "properties": {"place": _PLACE}, "required": ["place"]}
_FUNCTION: Mapping[str, Any] = {
    "name": "weather",
    "description": "It's the weather & more",
    "parameters": _SCHEMA,
}
_ARGUMENTS = {"place": "Zürich <ZH>", "days": 3, "units": ["°C", None, True]}
_SYSTEM = _said("system", "Be brief.\n")
_QUESTION = _said("user", " Will it rain in Zürich? 🌧 <b>&amp;</b> ")
_ANSWER = _said("assistant", "No. ")
_THANKS = _said("user", "Thanks!")
_RESULT = _said("tool", '{"rain": false}', name="weather", tool_call_id="call12345")
_DOCUMENT = {"title": "Rain", "text": "It rains where clouds are.", "doc_id": "1"}


def _call(arguments: object, content: object = "", **more: object) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    call = {"id": "call12345", "type": "function", "function": function}
    return _said("assistant", content, tool_calls=[call], **more)


TOOLS = {
    "tools": [
        {"type": "function", "function": {**_FUNCTION, "name": n}} for n in ("weather", "sea")
    ]
}
CONVERSATIONS = (
    SampleChat("a question", [_QUESTION]),
    SampleChat("a system", [_SYSTEM, _QUESTION, _ANSWER, _THANKS]),
    SampleChat("no prompt", [_QUESTION, _ANSWER], {"add_generation_prompt": False}),
    SampleChat("parts", [_said("user", [{"type": "text", "text": "Rain?"}])]),
    SampleChat("tools", [_SYSTEM, _QUESTION], TOOLS),
    SampleChat("tools and no system", [_QUESTION], TOOLS),
    SampleChat("a call", [_QUESTION, _call(_ARGUMENTS), _RESULT], TOOLS),
    SampleChat("a call in text", [_QUESTION, _call(json.dumps(_ARGUMENTS)), _RESULT], TOOLS),
    SampleChat("a call alone", [_QUESTION, _call(_ARGUMENTS, None), _RESULT], TOOLS),
    SampleChat(
        "two turns of calls",
        [_SYSTEM, _QUESTION, _call(_ARGUMENTS), _RESULT, _ANSWER, _THANKS, _call({}), _RESULT],
        TOOLS,
    ),
    SampleChat("calls without tools", [_QUESTION, _call(_ARGUMENTS), _RESULT]),
    SampleChat("no tools at all", [_QUESTION], {"tools": []}),
    SampleChat("a thought", [_QUESTION, {**_ANSWER, "reasoning_content": "Clouds?\n"}, _THANKS]),
    SampleChat("a thought of old", [_QUESTION, {**_ANSWER, "thinking": "Hm."}, _THANKS]),
    SampleChat(
        "a thought in the text", [_QUESTION, _said("assistant", "<think>\nHm.\n</think>\n\nNo.")]
    ),
    SampleChat(
        "a thought before a call",
        [_QUESTION, _call(_ARGUMENTS, reasoning_content="I shall ask."), _RESULT],
        TOOLS,
    ),
    SampleChat("thinking on", [_QUESTION], {"enable_thinking": True, "thinking": True}),
    SampleChat("thinking off", [_QUESTION], {"enable_thinking": False, "thinking": False}),
    SampleChat("documents", [_QUESTION], {"documents": [_DOCUMENT, _DOCUMENT]}),
    SampleChat("documents and tools", [_QUESTION], {"documents": [_DOCUMENT], **TOOLS}),
    SampleChat("an unknown role", [_said("critic", "Hm.")]),
    SampleChat("an assistant first", [_ANSWER, _QUESTION]),
)


def differences(source: str) -> Iterator[str]:
    """The conversations that `source` renders otherwise than transformers does."""
    for conversation in CONVERSATIONS:
        ours, theirs = ours_of(source, conversation), theirs_of(source, conversation)
        if ours != theirs:
            yield f"{conversation.name}:\n  ours   {ours!r}\n  theirs {theirs!r}"


def ours_of(source: str, conversation: SampleChat) -> str | None:
    """None: refused."""
    try:
        template = ChatTemplate(source, SPECIAL)
        return template.render(conversation.messages, conversation.variables)
    except (InvalidRequest, ConfigError):
        return None


def theirs_of(source: str, conversation: SampleChat) -> str | None:
    """None: refused."""
    given = {"add_generation_prompt": True, **conversation.variables}
    try:
        rendered = _TRANSFORMERS.apply_chat_template(
            conversation.messages, chat_template=source, tokenize=False, **given
        )
    except Exception:  # transformers lets any error of a template through
        return None
    return str(rendered)


def main(folder: Path) -> int:
    """Prints each difference; the exit status says whether there was one."""
    sources = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.jinja")}
    num_rendered, num_different = 0, 0
    for name, source in sorted(sources.items()):
        num_rendered += sum(theirs_of(source, one) is not None for one in CONVERSATIONS)
        for difference in differences(source):
            num_different += 1
            print(f"{name}, {difference}")
    asked = len(sources) * len(CONVERSATIONS)
    print(f"{len(sources)} templates, {asked} conversations, {num_rendered} rendered by both")
    print(f"{num_different} differ")
    return int(num_different > 0 or not sources)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
