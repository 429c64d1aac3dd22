"""Donation: what a request computed goes to the tree, while it runs and when it ends."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Protocol

from ferryman.cache.branch import Branch
from ferryman.cache.keys import PageKey, root_key
from ferryman.cache.manifest import Kind
from ferryman.cache.resume import resume_set
from ferryman.cache.slots import TREE, SlotHandle
from ferryman.schedule.events import Cached, CachedUnit, Event
from ferryman.schedule.residence import Residence
from ferryman.schedule.sequence import Running

Units = dict[Kind, dict[int, SlotHandle]]


class Donation(Protocol):
    """Where what a request computed goes."""

    def publish_point(self, sequence: Running, position: int, now: float) -> None:
        """Gives all there is to resume at one of the request's points, whose step has run."""
        ...

    def publish_prompt(self, sequence: Running, now: float) -> None:
        """Gives all full pages of the prompt."""
        ...

    def donate(self, sequence: Running, now: float) -> None:
        """Gives what decoding has filled since, and the newest point of it."""
        ...


class ToNobody:
    """Without a prefix cache it all goes back to the pools."""

    def publish_point(self, sequence: Running, position: int, now: float) -> None:
        pass

    def publish_prompt(self, sequence: Running, now: float) -> None:
        pass

    def donate(self, sequence: Running, now: float) -> None:
        pass


class ToTree:
    """Publishes in the prefix tree, and says so. `root` is the key above all first pages.

    Window pages go with a point only: elsewhere they would serve nobody, and their slots, once
    given, are lost to the request.
    """

    def __init__(self, residence: Residence, root: PageKey, events: list[Event]) -> None:
        self._residence = residence
        self._manifest = residence.manifest
        self._tree = residence.tree
        self._root = root
        self._events = events

    def publish_point(self, sequence: Running, position: int, now: float) -> None:
        sequence.points.remove(position)
        self._give_point(sequence, position, sequence.snapshots.pop(position, None), now)

    def publish_prompt(self, sequence: Running, now: float) -> None:
        self._give_pages(sequence, sequence.prompt_len // self._manifest.page_size, now)

    def donate(self, sequence: Running, now: float) -> None:
        """The newest certain state at a page's end goes to the tree, and the pages below it."""
        if not sequence.drawn:
            return
        manifest, salt = self._manifest, sequence.request.tenant_salt
        root = root_key(manifest, salt) if salt else self._root
        sequence.extend_keys_to(root, manifest.page_size)
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

    def _stands_on_page_end(self, sequence: Running) -> bool:
        """Whether a run of drafts ended on a page's end and no step goes on from there: then the
        working slot is what would have been saved."""
        position = sequence.computed
        is_page_end = position % self._manifest.page_size == 0 and position > sequence.prompt_len
        return is_page_end and sequence.drafts and not sequence.in_flight and bool(sequence.working)

    def _give_point(
        self, sequence: Running, position: int, snapshot: SlotHandle | None, now: float
    ) -> None:
        """The state goes back when its window is no longer whole: a cancel may come that late."""
        num_pages = position // self._manifest.page_size
        units = self._full_units(sequence, num_pages)
        if Kind.WINDOW in sequence.own:
            span, held = resume_set(self._manifest, position).window, sequence.own[Kind.WINDOW]
            if not all(page in held for page in range(*span)):
                self._residence.retire([snapshot] if snapshot else [], sequence.holder)
                return
            units[Kind.WINDOW] = {page: held[page] for page in range(*span)}
        if snapshot is not None:
            units[Kind.RECURRENT] = {num_pages - 1: snapshot}
        self._publish(sequence, num_pages, units, now)

    def _give_pages(self, sequence: Running, num_pages: int, now: float) -> None:
        self._publish(sequence, num_pages, self._full_units(sequence, num_pages), now)

    def _full_units(self, sequence: Running, num_pages: int) -> Units:
        if Kind.FULL not in sequence.own:
            return {}
        pages = sequence.own[Kind.FULL].items()
        return {Kind.FULL: {page: handle for page, handle in pages if page < num_pages}}

    def _publish(self, sequence: Running, num_pages: int, units: Units, now: float) -> None:
        """Ownership changes by changing leases; nothing is copied. Where the tree has a page, the
        request goes on with the tree's slot and its own is given back."""
        keys = sequence.keys[:num_pages]
        if not keys or not any(units.values()):
            return
        inserted = self._tree.insert(Branch(keys, units), now)
        pools = self._residence.pools
        pools.move(inserted.adopted, sequence.holder, TREE)
        pools.release(inserted.dropped, TREE)
        self._swap_duplicates(sequence, inserted.duplicates)
        self._move_anchor(sequence, num_pages, now)
        if inserted.adopted:
            self._events.append(_cached(sequence, keys, units, set(inserted.adopted)))

    def _swap_duplicates(
        self, sequence: Running, duplicates: Sequence[tuple[int, SlotHandle, SlotHandle]]
    ) -> None:
        """The page table points at the tree's slot first; only then is the own slot given back."""
        for page, own, canonical in duplicates:
            if own.kind is Kind.FULL:
                self._residence.rows.set_page(Kind.FULL, sequence.row, page, canonical.slot)
        if slots := [own for _, own, _ in duplicates if own.kind is not Kind.WINDOW]:
            self._residence.retire(slots, sequence.holder)

    def _move_anchor(self, sequence: Running, num_pages: int, now: float) -> None:
        """From here on the pages up to `num_pages` are the tree's, protected by one hold."""
        for pages in (sequence.own[k] for k in sequence.own if k is Kind.FULL):
            for page in [page for page in pages if page < num_pages]:
                del pages[page]
        self._lease_donated_windows(sequence, num_pages)
        old = sequence.anchor_pages
        if num_pages > old:
            self._tree.hold(sequence.keys[num_pages - 1], now)
            sequence.anchor_pages = num_pages
            if old:
                self._residence.retire((), sequence.holder, held_keys=(sequence.keys[old - 1],))

    def _lease_donated_windows(self, sequence: Running, num_pages: int) -> None:
        """A donated window page is still read by its request: it keeps a lease of its own."""
        pools = self._residence.pools
        for page, handle in sequence.own.get(Kind.WINDOW, {}).items():
            if page < num_pages and sequence.holder not in pools[Kind.WINDOW].holders(handle):
                pools.lease((handle,), sequence.holder)


def _cached(
    sequence: Running,
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
