"""Why pages are computed although they might have been reused."""

from __future__ import annotations

from typing import NamedTuple

from ferryman.cache.resume import Reason, Shortfall, Uncached

# What a slower tier could have mended.
_LACKING = (Reason.NEVER_SEEN, Reason.NO_SNAPSHOT, Reason.WINDOW_EVICTED)


class Match(NamedTuple):
    """How far a prompt of `prompt_len` tokens is known, in pages.

    `limit` is the deepest page end at which it may resume, `seen` the end of what is held.
    """

    prompt_len: int
    page_size: int
    limit: int
    seen: int

    def uncached(self, depth: int, refused: Reason, shortfall: Shortfall) -> tuple[Uncached, ...]:
        """The reasons for all pages from `depth` on, where the prompt resumes.

        `refused` says why it does not resume deeper, `shortfall` what slower tiers did not bring.
        """
        pages = -(-self.prompt_len // self.page_size)
        usable = max(depth, self.limit)
        all_seen = self.seen >= self.prompt_len // self.page_size
        aligned = pages if all_seen else max(usable, self.seen)
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
