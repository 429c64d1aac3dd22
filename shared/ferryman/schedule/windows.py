"""Sliding windows: a page behind the window gives its slot to the page that comes next."""

from __future__ import annotations

from ferryman.cache.manifest import Kind
from ferryman.cache.resume import resume_set
from ferryman.schedule.residence import Residence
from ferryman.schedule.rows import NO_SLOT
from ferryman.schedule.sequence import Running


def slide(residence: Residence, sequence: Running, position: int) -> None:
    """Takes out every window page that no query at `position` or later reads.

    The windows of snapshots on their way stay: a snapshot without its window resumes nothing.
    """
    pages = sequence.own.get(Kind.WINDOW)
    if pages is None:
        return
    oldest = resume_set(residence.manifest, position).window.first
    awaited = _awaited(residence, sequence)
    for page in [page for page in pages if page < oldest and page not in awaited]:
        handle = pages.pop(page)
        residence.rows.set_page(Kind.WINDOW, sequence.row, page, NO_SLOT)
        if residence.pools[Kind.WINDOW].holders(handle) == (sequence.holder,):
            sequence.spare.append(handle)
        else:
            residence.retire((handle,), sequence.holder)


def _awaited(residence: Residence, sequence: Running) -> set[int]:
    """Window pages that will be donated with a snapshot whose step has not committed."""
    spans = [resume_set(residence.manifest, place).window for place in sequence.snapshots]
    return {page for span in spans for page in range(span.first, span.end)}


def cover(residence: Residence, sequence: Running, start: int, end: int) -> None:
    """Gives every page that meets [start, end) a slot, from the spare ones of the request."""
    pages = sequence.own.get(Kind.WINDOW)
    if pages is None:
        return
    page_size = residence.manifest.page_size
    for page in range(start // page_size, -(-end // page_size)):
        if page not in pages:
            handle = pages[page] = sequence.spare.pop()
            residence.rows.set_page(Kind.WINDOW, sequence.row, page, handle.slot)
