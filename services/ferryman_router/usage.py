"""What a client is told about its tokens: counted once, whatever attempts there were. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from ferryman.wire.values import UncachedPages, Usage


def settled_usage(counted: Usage | None, prompt_len: int, num_generated: int) -> Usage:
    """The first attempt's cache counts, at most the prompt; lengths are the router's own."""
    if counted is None:
        return Usage(prompt_len, num_generated)
    return Usage(prompt_len, num_generated, counted.cached.at_most(prompt_len), counted.uncached)


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
