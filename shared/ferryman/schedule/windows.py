"""Sliding windows: a page behind the window gives its slot to the page that comes next.

All slots that a request will ever need were taken when it was admitted (`cache/window_budget.py`),
so nothing here allocates. What it turns out not to need goes back once its prompt is computed.
"""

from __future__ import annotations

from collections.abc import Container

from ferryman.cache.manifest import Kind
from ferryman.cache.resume import resume_set
from ferryman.cache.window_budget import first_page
from ferryman.schedule.residence import Residence
from ferryman.schedule.rows import NO_SLOT
from ferryman.schedule.sequence import Running


def slide(residence: Residence, sequence: Running, position: int) -> None:
    """Takes out every window page that neither a query at `position` or later reads, nor whoever
    resumes at a point of this request: a point without its window resumes nothing."""
    if Kind.WINDOW not in sequence.own:
        return
    manifest, page_size = residence.manifest, residence.manifest.page_size
    newest = min(position, newest_point(sequence, page_size))
    oldest = first_page(manifest, newest)
    _take_out(residence, sequence, oldest, spared=_awaited(residence, sequence))


def newest_point(sequence: Running, page_size: int) -> int:
    """The newest position beyond the prompt at which the next turn could resume.

    With recurrent state that is the newest track whose step has run, else any page's end. Before
    there is one, it is the first that will be.
    """
    if sequence.working is None:
        return max(sequence.computed, sequence.prompt_len + page_size) // page_size * page_size
    places = sorted(track.position for track in sequence.tracks)
    certain = [place for place in places if place <= sequence.computed]
    return (certain[-1:] or places or [sequence.scheduled])[0]


def _awaited(residence: Residence, sequence: Running) -> set[int]:
    """Window pages that go to the tree with a point whose step has not committed."""
    spans = [resume_set(residence.manifest, place).window for place in sequence.points]
    return {page for span in spans for page in range(span.first, span.end)}


def _take_out(
    residence: Residence, sequence: Running, oldest: int, *, spared: Container[int]
) -> None:
    pages = sequence.own[Kind.WINDOW]
    for page in [page for page in pages if page < oldest and page not in spared]:
        handle = pages.pop(page)
        residence.rows.set_page(Kind.WINDOW, sequence.row, page, NO_SLOT)
        if residence.pools[Kind.WINDOW].holders(handle) == (sequence.holder,):
            sequence.spare.append(handle)
        else:
            residence.retire((handle,), sequence.holder)


def cover(residence: Residence, sequence: Running, start: int, end: int) -> None:
    """Gives every page that meets [start, end) a slot, from the spare ones of the request.

    A pool that has just room for the request keeps nothing for the next turn.
    """
    pages = sequence.own.get(Kind.WINDOW)
    if pages is None:
        return
    page_size = residence.manifest.page_size
    for page in range(start // page_size, -(-end // page_size)):
        if page not in pages:
            if not sequence.spare:
                _take_out(residence, sequence, first_page(residence.manifest, start), spared=())
            handle = pages[page] = sequence.spare.pop()
            residence.rows.set_page(Kind.WINDOW, sequence.row, page, handle.slot)


def trim(residence: Residence, sequence: Running) -> None:
    """The prompt is computed: slots that chunks needed and decoding will not go back."""
    if Kind.WINDOW not in sequence.own:
        return
    slide(residence, sequence, sequence.scheduled)
    windows = sequence.plan.windows
    extra = min(len(sequence.spare), windows.most - windows.behind_prompt)
    residence.retire([sequence.spare.pop() for _ in range(extra)], sequence.holder)
