"""Publishes a request's computed state in the tree, while it runs and when it ends."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from ferryman.cache.keys import PageKey, root_key
from ferryman.cache.manifest import Kind
from ferryman.cache.node import Branch
from ferryman.cache.resume import resume_set
from ferryman.cache.slots import TREE, SlotHandle
from ferryman.schedule.events import Cached, CachedUnit, Event
from ferryman.schedule.sequence import RunningSequence
from ferryman.schedule.slot_allocator import SlotAllocator

Units = dict[Kind, dict[int, SlotHandle]]


class TreePublisher:
    """Publishes in the prefix tree and reports it as an event. `root` is the key above all first
    pages.

    Window pages are published only with a resume point: elsewhere they are useless, and the request
    loses their slots.
    """

    def __init__(self, allocator: SlotAllocator, root: PageKey, events: list[Event]) -> None:
        self._allocator = allocator
        self._manifest = allocator.manifest
        self._tree = allocator.tree
        self._root = root
        self._events = events

    def publish_point(self, sequence: RunningSequence, position: int, now: float) -> None:
        """Publishes all units to resume at one of the request's points, whose step has run."""
        sequence.points.remove(position)
        if not self._may_publish(sequence):
            return  # its snapshot goes back with the request
        self._give_point(sequence, position, sequence.snapshots.pop(position, None), now)

    def publish_prompt(self, sequence: RunningSequence, now: float) -> None:
        """Publishes all full pages of the prompt, whose points are published, and pins those that
        its caller marked."""
        if not self._may_publish(sequence):
            return
        page_size, request = self._manifest.page_size, sequence.request
        self._give_pages(sequence, sequence.prompt_len // page_size, now)
        for pin in request.pins:
            keys = sequence.keys[: pin.position // page_size]
            self._tree.pin(keys, now + pin.seconds, request.tenant_salt, now)

    def donate(self, sequence: RunningSequence, now: float) -> None:
        """Publishes the pages that decoding has filled, and the newest certain state at a page's
        end."""
        if not sequence.drawn:
            return
        manifest, salt = self._manifest, sequence.request.tenant_salt
        adapter = sequence.request.adapter.digest
        root = root_key(manifest, salt, adapter) if salt or adapter else self._root
        # First, because a request that goes back to wait has to have the keys of all its pages.
        sequence.extend_keys_to(root, manifest.page_size)
        # Before its first step it has computed nothing, and slots to be copied into hold no state.
        if not self._may_publish(sequence) or sequence.opening:
            return
        certain = [track for track in sequence.tracks if track.position <= sequence.frozen]
        if self._stands_on_page_end(sequence):
            working, sequence.working = sequence.working, None
            self._give_point(sequence, sequence.computed, working, now)
        elif certain:
            newest = max(certain, key=lambda track: track.position)
            sequence.tracks.remove(newest)
            self._give_point(sequence, newest.position, newest.handle, now)
        elif sequence.working is None:
            end = sequence.computed // manifest.page_size * manifest.page_size
            self._give_point(sequence, end, None, now)
        self._give_pages(sequence, sequence.computed // manifest.page_size, now)

    def _may_publish(self, sequence: RunningSequence) -> bool:
        return self._allocator.has_prefix_cache and not sequence.is_doubtful

    def _stands_on_page_end(self, sequence: RunningSequence) -> bool:
        """Whether a run of drafts ended on a page's end and no step goes on from there: then the
        working slot holds the state to save."""
        position = sequence.computed
        is_page_end = position % self._manifest.page_size == 0 and position > sequence.prompt_len
        return is_page_end and sequence.drafts and not sequence.in_flight and bool(sequence.working)

    def _give_point(
        self, sequence: RunningSequence, position: int, snapshot: SlotHandle | None, now: float
    ) -> None:
        """Gives the snapshot back when its window is no longer whole, as after a late cancel."""
        num_pages = position // self._manifest.page_size
        units = self._full_units(sequence, num_pages)
        if Kind.WINDOW in sequence.own:
            span, held = resume_set(self._manifest, position).window, sequence.own[Kind.WINDOW]
            if not all(page in held for page in range(*span)):
                self._allocator.retire([snapshot] if snapshot else [], sequence.holder)
                return
            units[Kind.WINDOW] = {page: held[page] for page in range(*span)}
        if snapshot is not None:
            units[Kind.RECURRENT] = {num_pages - 1: snapshot}
        self._publish(sequence, num_pages, units, now)

    def _give_pages(self, sequence: RunningSequence, num_pages: int, now: float) -> None:
        self._publish(sequence, num_pages, self._full_units(sequence, num_pages), now)

    def _full_units(self, sequence: RunningSequence, num_pages: int) -> Units:
        if Kind.FULL not in sequence.own:
            return {}
        pages = sequence.own[Kind.FULL].items()
        return {Kind.FULL: {page: handle for page, handle in pages if page < num_pages}}

    def _publish(self, sequence: RunningSequence, num_pages: int, units: Units, now: float) -> None:
        """Ownership changes by changing leases; nothing is copied. If the tree has a page
        already, the request uses the tree's slot and gives its own back."""
        keys = sequence.keys[:num_pages]
        if not keys or not any(units.values()):
            return
        inserted = self._tree.insert(Branch(keys, units), now)
        pools = self._allocator.pools
        pools.move(inserted.adopted, sequence.holder, TREE)
        pools.release(inserted.dropped, TREE)
        self._swap_duplicates(sequence, inserted.duplicates)
        self._move_anchor(sequence, num_pages, now)
        if inserted.adopted:
            self._events.append(_cached(sequence, keys, units, set(inserted.adopted)))

    def _swap_duplicates(
        self, sequence: RunningSequence, duplicates: Sequence[tuple[int, SlotHandle, SlotHandle]]
    ) -> None:
        """Points the page table at the tree's slot before it gives the request's slot back."""
        for page, handle, canonical in duplicates:
            if handle.kind is Kind.FULL:
                sequence.reuses = True
                self._allocator.rows.set_page(Kind.FULL, sequence.row, page, canonical.slot)
        if slots := [handle for _, handle, _ in duplicates if handle.kind is not Kind.WINDOW]:
            self._allocator.retire(slots, sequence.holder)

    def _move_anchor(self, sequence: RunningSequence, num_pages: int, now: float) -> None:
        """Gives the pages up to `num_pages` to the tree, protected by one hold."""
        for pages in (sequence.own[k] for k in sequence.own if k is Kind.FULL):
            for page in [page for page in pages if page < num_pages]:
                del pages[page]
        self._lease_donated_windows(sequence, num_pages)
        old = sequence.anchor_pages
        if num_pages > old:
            self._tree.hold(sequence.keys[num_pages - 1], now)
            sequence.anchor_pages = num_pages
            if old:
                self._allocator.retire((), sequence.holder, held_keys=(sequence.keys[old - 1],))

    def _lease_donated_windows(self, sequence: RunningSequence, num_pages: int) -> None:
        """A request still reads the window pages it has published, so it keeps leases of its
        own."""
        pools = self._allocator.pools
        for page, handle in sequence.own.get(Kind.WINDOW, {}).items():
            if page < num_pages and sequence.holder not in pools[Kind.WINDOW].holders(handle):
                pools.lease((handle,), sequence.holder)


def _cached(
    sequence: RunningSequence,
    keys: Sequence[PageKey],
    units: Mapping[Kind, Mapping[int, SlotHandle]],
    adopted: Container[SlotHandle],
) -> Cached:
    new = tuple(
        CachedUnit(kind, page, keys[page], handle)
        for kind, pages in units.items()
        for page, handle in pages.items()
        if handle in adopted
    )
    return Cached(sequence.request_id, tuple(keys), new)
