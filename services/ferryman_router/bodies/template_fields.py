"""The fields of a chat that its template reads besides the messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ferryman.errors import InvalidRequest
from ferryman.text.tokenizer import CONTINUES

MAX_VARIABLES_CHARS = 1 << 20
MAX_DOCUMENTS = 1024
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
GENERATION = "add_generation_prompt"
_THINKS = ("enable_thinking", "thinking")  # Qwen, GLM, Gemma; DeepSeek, Kimi, Granite
# Given by the request or by the model.
_TAKEN = frozenset({"messages", "tools", "documents", CONTINUES, GENERATION})


def template_variables(values: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> str:
    """JSON text of an object for the template, empty for none. InvalidRequest names the field."""
    variables: dict[str, Any] = dict(values["chat_template_kwargs"])
    if taken := sorted(_TAKEN & variables.keys()):
        name = f"chat_template_kwargs.{taken[0]}"
        raise InvalidRequest(f"{name} is not set here: {taken[0]} has a field of its own", name)
    variables |= _effort(values.get("reasoning_effort"), variables)
    if tools:
        variables["tools"] = list(tools)
    if documents := values.get("documents"):
        if len(documents) > MAX_DOCUMENTS or not all(
            isinstance(document, dict) for document in documents
        ):
            message = f"documents must be at most {MAX_DOCUMENTS} objects"
            raise InvalidRequest(message, "documents")
        variables["documents"] = documents
    variables |= _place_of_the_answer(values)
    text = json.dumps(variables) if variables else ""
    if len(text) > MAX_VARIABLES_CHARS:
        message = f"what the template reads has more than {MAX_VARIABLES_CHARS} characters"
        raise InvalidRequest(message, "chat_template_kwargs")
    return text


def whether_to_think(thinks: bool) -> dict[str, bool]:
    """The variables by which templates know it."""
    return dict.fromkeys(_THINKS, thinks)


def _effort(effort: str | None, variables: Mapping[str, Any]) -> dict[str, Any]:
    """Templates have one name for an effort, and others for whether to think at all: a body that
    asks for an effort wants thoughts, unless it sets those itself."""
    if effort is None:
        return {}
    thinks = {} if variables.keys() & set(_THINKS) else whether_to_think(effort != "none")
    return {"reasoning_effort": effort, **thinks}


def _place_of_the_answer(values: Mapping[str, Any]) -> dict[str, Any]:
    """An answer is a turn of its own, or goes on with the last message, or neither."""
    continues, begins = values.get("continue_final_message", False), values.get(GENERATION)
    begins = not continues if begins is None else begins
    if continues and begins:
        message = f"continue_final_message and {GENERATION} exclude each other"
        raise InvalidRequest(message, "continue_final_message")
    if continues:
        return {CONTINUES: True, GENERATION: False}
    return {} if begins else {GENERATION: False}
