"""What one worker's device cache holds, by its own account: page keys per state kind.

Events are numbered. One that is missing makes everything behind it a guess, so the events that
follow are kept aside until a snapshot has said what there is.

    usable prefix = deepest position that every kind can resume from:
        full       every page before it       (evicted leaf first: presence is prefix-closed)
        window     the pages its window meets
        recurrent  the snapshot at just that page end
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind

MAX_WAITING = 1024


@dataclass(frozen=True, slots=True)
class CacheChange:
    """One cache event; `removed` happened before `stored`."""

    sequence: int
    removed: Mapping[Kind, Sequence[PageKey]]
    stored: Mapping[Kind, Sequence[PageKey]]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that was held after event `sequence`."""

    sequence: int
    held: Mapping[Kind, Sequence[PageKey]]


class Holdings:
    """The keys of one life of one worker; nothing is known before its first snapshot."""

    def __init__(self, kinds: Iterable[Kind], window_len: int, page_size: int) -> None:
        self._keys: dict[Kind, set[PageKey]] = {kind: set() for kind in kinds}
        self._window_len, self._page_size = window_len, page_size
        self._sequence: int | None = None
        self._waiting: dict[int, CacheChange] = {}

    def apply(self, change: CacheChange) -> bool:
        """Takes an event in; False when a snapshot must be asked for (once for every gap)."""
        if self._sequence is not None and change.sequence <= self._sequence:
            return True
        had_gap = bool(self._waiting) or self._sequence is None
        if len(self._waiting) < MAX_WAITING:
            self._waiting[change.sequence] = change
        self._catch_up()
        return had_gap or not self._waiting

    def replace(self, snapshot: Snapshot) -> bool:
        """Starts over from a snapshot; False when events behind it are missing as well."""
        if self._sequence is not None and snapshot.sequence < self._sequence:
            return True
        for kind, keys in self._keys.items():
            keys.clear()
            keys.update(snapshot.held.get(kind, ()))
        self._sequence = snapshot.sequence
        self._waiting = {n: c for n, c in self._waiting.items() if n > snapshot.sequence}
        self._catch_up()
        return not self._waiting

    def _catch_up(self) -> None:
        while self._sequence is not None and self._sequence + 1 in self._waiting:
            self._sequence += 1
            change = self._waiting.pop(self._sequence)
            for kind, keys in change.removed.items():
                self._keys.setdefault(kind, set()).difference_update(keys)
            for kind, keys in change.stored.items():
                self._keys.setdefault(kind, set()).update(keys)

    # Matching.

    def depth(self, keys: Sequence[PageKey]) -> int:
        """Full pages held from the root on, by bisection. Without full layers: all of them."""
        if Kind.FULL not in self._keys:
            return len(keys)
        held, low, high = self._keys[Kind.FULL], 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in held:
                low = middle + 1
            else:
                high = middle
        return low

    def usable_tokens(self, keys: Sequence[PageKey], prompt_len: int) -> int:
        """Tokens that need not be computed here; one of the prompt always is."""
        limit = max(0, prompt_len - 1) // self._page_size
        depth = min(self.depth(keys), limit)
        while depth > 0 and not self._can_resume(keys, depth):
            depth -= 1
        return depth * self._page_size

    def _can_resume(self, keys: Sequence[PageKey], depth: int) -> bool:
        recurrent, window = self._keys.get(Kind.RECURRENT), self._keys.get(Kind.WINDOW)
        if recurrent is not None and keys[depth - 1] not in recurrent:
            return False
        if window is None:
            return True
        oldest = max(0, depth * self._page_size - self._window_len + 1) // self._page_size
        return all(keys[page] in window for page in range(oldest, depth))
