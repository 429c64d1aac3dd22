"""What a client is told about its tokens: counted once, whatever attempts there were. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ferryman.wire.values import UncachedPages, Usage


def settled_usage(
    prompt: Usage | None, output: Usage | None, prompt_len: int, num_generated: int
) -> Usage:
    """The first attempt's cache counts, at most the prompt, and the last one's drafts; lengths are
    the router's own."""
    usage = Usage(prompt_len, num_generated)
    if prompt is not None:
        cached = prompt.cached.at_most(prompt_len)
        usage = replace(usage, cached=cached, uncached=prompt.uncached)
    if output is None:
        return usage
    accepted = min(output.accepted_tokens, num_generated)
    return replace(usage, drafted_tokens=output.drafted_tokens, accepted_tokens=accepted)


def uncached_tokens(usage: Usage, page_size: int) -> dict[str, int]:
    """Tokens computed, by reason: pages times their size, the partial last page as it is."""
    left = usage.prompt_tokens - usage.cached.total
    found: dict[str, int] = {}
    for some in _in_order(usage.uncached):
        tokens = min(left, some.pages * page_size)
        if tokens:
            found[some.reason] = found.get(some.reason, 0) + tokens
            left -= tokens
    return found


def _in_order(uncached: Iterable[UncachedPages]) -> list[UncachedPages]:
    """The plan names reasons in the order of pages, so the last is the one that is cut short."""
    return list(uncached)
