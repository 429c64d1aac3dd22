"""What a client is told about its tokens: counted once, whatever attempts there were. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from ferryman.handoff.usage import CachedTokens
from ferryman.wire.values import UncachedPages, Usage


def settled_usage(counted: Usage | None, prompt_len: int, num_generated: int) -> Usage:
    """The first attempt's cache counts, at most the prompt; lengths are the router's own."""
    if counted is None:
        return Usage(prompt_len, num_generated)
    cached = _clipped(counted.cached, prompt_len)
    return Usage(prompt_len, num_generated, cached, counted.uncached)


def _clipped(cached: CachedTokens, prompt_len: int) -> CachedTokens:
    device = min(cached.device, prompt_len)
    host = min(cached.host, prompt_len - device)
    return CachedTokens(device, host, min(cached.storage, prompt_len - device - host))


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
