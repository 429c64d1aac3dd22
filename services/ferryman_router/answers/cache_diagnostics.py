"""The difference between a prompt and an earlier one that its caller names, in each protocol.

Anthropic's `diagnostics` of a message, by the id of an earlier message; OpenAI's
`prompt_cache_diagnostics` of a response, by that of an earlier response. Where and how two prompts
part is told besides, in `usage.ferryman.parts`, without being asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ferryman.text.located_prompt import TEMPLATE
from ferryman.wire.public import Parting
from ferryman_router.bodies.parsed_request import ParsedRequest
from ferryman_router.bodies.unread_fields import Api
from ferryman_router.routing.generate_request import TokenizedRequest
from ferryman_router.routing.recent_prompts import (
    Alike,
    Comparison,
    OtherModel,
    Unknown,
    Unlike,
)

Compare = Callable[[TokenizedRequest, str], Comparison]


def cache_diagnostics(
    body: ParsedRequest, asked: TokenizedRequest, compare: Compare
) -> dict[str, Any]:
    """The fields of the answer that say how its prompt differs; none if the body does not ask."""
    named = body.answer.compared_with
    if named is None:
        return {}
    if body.api is Api.MESSAGES:
        comparison = compare(asked, named.removeprefix("msg_")) if named else Alike()
        return {"diagnostics": anthropic_diagnostics(comparison)}
    comparison = compare(asked, named.removeprefix("resp_"))
    return {"prompt_cache_diagnostics": openai_diagnostics(comparison)}


def anthropic_diagnostics(comparison: Comparison) -> dict[str, Any] | None:
    """None where nothing before the end of the earlier prompt differs."""
    match comparison:
        case Alike():
            return None
        case Unknown():
            reason: Mapping[str, Any] = {"type": "previous_message_not_found"}
        case OtherModel(num_tokens):
            reason = _missed("model_changed", num_tokens)
        case Unlike():
            reason = {"type": "unavailable"}
        case Parting(place=place, missed_tokens=missed):
            reason = _missed(_anthropic_reason(place), missed)
    return {"cache_miss_reason": reason}


def _missed(reason: str, num_tokens: int) -> dict[str, Any]:
    if reason == "unavailable":
        return {"type": reason}
    return {"type": reason, "cache_missed_input_tokens": num_tokens}


def _anthropic_reason(place: str) -> str:
    # Later system messages are among the messages there.
    reasons = {TEMPLATE: "unavailable", "tools": "tools_changed", "system[0]": "system_changed"}
    return reasons.get(place, "messages_changed")


def openai_diagnostics(comparison: Comparison) -> dict[str, Any]:
    """One of the four types that OpenAI has."""
    match comparison:
        case Alike():
            return {"type": "cache_hit"}
        case Unknown():
            return {"type": "comparison_response_not_found"}
        case OtherModel(num_tokens):
            reason, missed = "model_changed", num_tokens
        case Parting(place=place, missed_tokens=missed) if place != TEMPLATE:
            reason = "tools_changed" if place == "tools" else "input_changed"
        case _:
            return {"type": "unavailable"}
    return {"type": "cache_miss", "reason": reason, "cache_missed_tokens": missed}
