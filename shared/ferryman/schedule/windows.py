"""Sliding windows: a page that leaves the window gives its slot to the next page.

Admission takes all slots that a request will ever need (`cache/window_budget.py`), so nothing here
allocates. Slots that it turns out not to need go back once its prompt is computed.
"""

from __future__ import annotations

from collections.abc import Container

from ferryman.cache.manifest import Kind
from ferryman.cache.resume import resume_set
from ferryman.cache.window_budget import first_page
from ferryman.schedule.rows import NO_SLOT
from ferryman.schedule.sequence import RunningSequence
from ferryman.schedule.slot_allocator import SlotAllocator


def slide(allocator: SlotAllocator, sequence: RunningSequence, position: int) -> None:
    """Removes every window page that is read neither by a query at `position` or later, nor by a
    resume at a point of this request: a resume point needs its window."""
    if Kind.WINDOW not in sequence.own:
        return
    manifest, page_size = allocator.manifest, allocator.manifest.page_size
    newest = min(position, newest_point(sequence, page_size))
    oldest = first_page(manifest, newest)
    _take_out(allocator, sequence, oldest, spared=_awaited(allocator, sequence))


def newest_point(sequence: RunningSequence, page_size: int) -> int:
    """The newest position beyond the prompt at which the next turn could resume.

    With recurrent state it is the newest track whose step has run, else the newest page end.
    Before such a position exists, it is the first that will exist.
    """
    if sequence.working is None:
        return max(sequence.computed, sequence.prompt_len + page_size) // page_size * page_size
    places = sorted(track.position for track in sequence.tracks)
    certain = [place for place in places if place <= sequence.computed]
    return (certain[-1:] or places or [sequence.scheduled])[0]


def _awaited(allocator: SlotAllocator, sequence: RunningSequence) -> set[int]:
    """Window pages that will be published with a point whose step has not committed."""
    spans = [resume_set(allocator.manifest, place).window for place in sequence.points]
    return {page for span in spans for page in range(span.first, span.end)}


def _take_out(
    allocator: SlotAllocator, sequence: RunningSequence, oldest: int, *, spared: Container[int]
) -> None:
    pages = sequence.own[Kind.WINDOW]
    for page in [page for page in pages if page < oldest and page not in spared]:
        handle = pages.pop(page)
        allocator.rows.set_page(Kind.WINDOW, sequence.row, page, NO_SLOT)
        if allocator.pools[Kind.WINDOW].holders(handle) == (sequence.holder,):
            sequence.spare.append(handle)
        else:
            allocator.retire((handle,), sequence.holder)


def cover(allocator: SlotAllocator, sequence: RunningSequence, start: int, end: int) -> None:
    """Gives every page that meets [start, end) a slot, from the spare ones of the request.

    A pool with just enough slots for the request keeps no window pages for the next turn.
    """
    pages = sequence.own.get(Kind.WINDOW)
    if pages is None:
        return
    page_size = allocator.manifest.page_size
    for page in range(start // page_size, -(-end // page_size)):
        if page not in pages:
            if not sequence.spare:
                _take_out(allocator, sequence, first_page(allocator.manifest, start), spared=())
            handle = pages[page] = sequence.spare.pop()
            allocator.rows.set_page(Kind.WINDOW, sequence.row, page, handle.slot)


def trim(allocator: SlotAllocator, sequence: RunningSequence) -> None:
    """Gives back the slots that the chunks of the prompt needed and decoding does not."""
    if Kind.WINDOW not in sequence.own:
        return
    slide(allocator, sequence, sequence.scheduled)
    windows = sequence.plan.windows
    extra = min(len(sequence.spare), windows.most - windows.after_prompt)
    allocator.retire([sequence.spare.pop() for _ in range(extra)], sequence.holder)
