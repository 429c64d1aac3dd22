"""Lines in system messages that are for a provider's books and say nothing to a model.

Claude Code begins its system prompt with one, `x-anthropic-billing-header: …; cch=eb6c6;`, whose
hash differs from request to request. It stands before all that is worth caching, so a prompt that
has it shares nothing with the prompt before. Gateways pass it on to the other endpoints. vLLM
leaves such a block out too.
"""

from __future__ import annotations

from typing import Any

from ferryman_router.bodies.place import BodyPlace

NAME = "x-anthropic-billing-header"
SYSTEM_ROLES = frozenset({"system", "developer"})
_BEGINS = f"{NAME}:"
_WHY = "it changes with every request and means nothing to a model"


def without_billing(content: Any, place: BodyPlace) -> Any:
    """The content of a system message, a text or a list of parts, without such lines at the head of
    the text or of a part. The very same content if there are none, or if the router keeps them."""
    if place.ignored.rules.is_verbatim:
        return content
    if isinstance(content, str):
        return _without(content, place)
    if not isinstance(content, list):
        return content
    parts = [_part(part, place.item(index)) for index, part in enumerate(content)]
    is_same = all(part is sent for part, sent in zip(parts, content, strict=True))
    return content if is_same else parts


def _part(part: Any, place: BodyPlace) -> Any:
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str) or (rest := _without(text, place)) is text:
        return part
    return {**part, "text": rest}


def _without(text: str, place: BodyPlace) -> str:
    rest = text
    while rest.startswith(_BEGINS):
        rest = rest.partition("\n")[2]
    if rest is not text:
        place.leave_out_line(NAME, _WHY)
    return rest
