"""Why pages are computed although they might have been reused."""

from __future__ import annotations

from math import ceil, floor

from ferryman.cache.resume import Reason, Shortfall, Uncached

# What a slower tier could have mended.
_LACKING = (Reason.NEVER_SEEN, Reason.NO_SNAPSHOT, Reason.WINDOW_EVICTED)


def uncached_spans(
    depth: int,
    limit: int,
    seen: int,
    prompt_pages: float,
    refused: Reason,
    shortfall: Shortfall,
) -> tuple[Uncached, ...]:
    """The reasons for all pages from `depth` on, where a prompt of so many pages resumes.

    `limit` is the deepest page end at which it might, `seen` the end of what is held. `refused`
    says why it does not resume deeper, `shortfall` what slower tiers did not bring.
    """
    pages = ceil(prompt_pages)
    usable = max(depth, limit)
    aligned = pages if seen >= floor(prompt_pages) else max(usable, seen)
    spans = []
    if depth < usable:
        spans.append(Uncached(refused, depth, usable))
    if usable < aligned:
        spans.append(Uncached(Reason.PAGE_ALIGNMENT, usable, aligned))
    if aligned < pages:
        spans.append(Uncached(Reason.NEVER_SEEN, aligned, pages))
    if shortfall.end_page > depth:
        spans = [part for span in spans for part in _split(span, shortfall)]
    return tuple(spans)


def _split(span: Uncached, shortfall: Shortfall) -> list[Uncached]:
    """The part of a span that a slower tier could have brought says why it did not."""
    reason, first, end = span
    if reason not in _LACKING or shortfall.end_page <= first:
        return [span]
    cut = min(end, shortfall.end_page)
    brought = Uncached(shortfall.reason, first, cut)
    return [brought, Uncached(reason, cut, end)] if cut < end else [brought]
