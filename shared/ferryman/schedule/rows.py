"""Rows: a running request's integers as arrays, so that a step is built by indexing.

Other servers call a page table a block table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ferryman.cache.manifest import Kind
from ferryman.schedule.batch import Ints

NO_SLOT = -1


class RowTable:
    """`page_tables[kind]` [rows, pages], `states` [rows, 1 + drafts], `positions` and `adapters`
    [rows].

    `states` are recurrent slots: the working slot, then the scratch slots. Unused entries are -1.
    """

    def __init__(
        self, num_rows: int, max_pages: int, kinds: Sequence[Kind], num_drafts: int = 0
    ) -> None:
        self.positions = np.zeros(num_rows, dtype=np.int64)
        self.adapters = np.zeros(num_rows, dtype=np.int64)
        self.states = np.full((num_rows, 1 + num_drafts), NO_SLOT, dtype=np.int64)
        self._pages: dict[Kind, Ints] = {
            kind: np.full((num_rows, max_pages), NO_SLOT, dtype=np.int64)
            for kind in kinds
            if kind is not Kind.RECURRENT
        }
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        return self._free.pop()

    def give_back(self, row: int) -> None:
        for table in self._pages.values():
            table[row] = NO_SLOT
        self.states[row] = NO_SLOT
        self.positions[row] = self.adapters[row] = 0
        self._free.append(row)

    def states_of(self, rows: Ints, depths: Ints | int) -> tuple[Ints, Ints]:
        """Slots read and written by tokens that come `depths` places after the known one: a draft
        reads the state that the token before it wrote."""
        written = self.states[rows, depths]
        if isinstance(depths, int):
            return written, written
        return self.states[rows, (depths - 1).clip(0)], written

    def set_page(self, kind: Kind, row: int, page: int, slot: int) -> None:
        self._pages[kind][row, page] = slot

    def set_pages(self, kind: Kind, row: int, first: int, slots: Sequence[int]) -> None:
        self._pages[kind][row, first : first + len(slots)] = slots

    def page_tables(self, rows: Ints, num_pages: int) -> Mapping[Kind, Ints]:
        """A copy, so that a submitted step never changes while the device runs it."""
        return {kind: table[rows, :num_pages] for kind, table in self._pages.items()}
