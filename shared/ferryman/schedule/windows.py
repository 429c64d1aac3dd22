"""Sliding windows: a page behind the window gives its slot to the page that comes next."""

from __future__ import annotations

from ferryman.cache.manifest import Kind
from ferryman.schedule.residence import Residence
from ferryman.schedule.rows import NO_SLOT
from ferryman.schedule.sequence import Running


def slide(residence: Residence, sequence: Running, position: int) -> None:
    """Takes out every window page that no query at `position` or later reads."""
    pages = sequence.own.get(Kind.WINDOW)
    if pages is None:
        return
    manifest = residence.manifest
    oldest = max(0, position - manifest.window_len + 1) // manifest.page_size
    for page in [page for page in pages if page < oldest]:
        handle = pages.pop(page)
        residence.rows.set_page(Kind.WINDOW, sequence.row, page, NO_SLOT)
        if residence.pools[Kind.WINDOW].holders(handle) == (sequence.holder,):
            sequence.spare.append(handle)
        else:
            residence.retire((handle,), sequence.holder)


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
