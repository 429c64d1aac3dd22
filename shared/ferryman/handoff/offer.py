"""The units that a prefill worker has of a prompt of n tokens, and when each may be sent.

Names are absolute. Decode asks for a part, because it holds the rest; the two lists may differ at
either end, and their intersection is sent:

admitted   pages the device tree holds            (not those a load-back is still writing)
chunk      every page that is full by now
held       the rest: partial page, window, and last of all the recurrent state
"""

from __future__ import annotations

from collections.abc import Iterable

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.resume import resume_set
from ferryman.errors import CorruptState
from ferryman.handoff.values import (
    PageRange,
    Reservation,
    UnitName,
    WantedUnit,
    difference,
    num_units,
)

_LAST = (Kind.FULL, Kind.WINDOW, Kind.RECURRENT)


def offered_ranges(manifest: StateManifest, prompt_len: int) -> tuple[PageRange, ...]:
    """The resume set of n: its pages, the last of them partial, and the state at n."""
    needs = resume_set(manifest, prompt_len)
    spans = {
        Kind.FULL: needs.full,
        Kind.WINDOW: needs.window,
        Kind.RECURRENT: (prompt_len, prompt_len + 1),
    }
    ranges = [(kind, *spans[kind]) for kind in manifest.kinds]
    return tuple(PageRange(kind, first, end) for kind, first, end in ranges if first < end)


class UnitsToSend:
    """The wanted units of one reservation, each handed out once.

    `offered` is all that prefill will have of the prompt; units that decode does not want are
    superfluous, and only counted. Raises CorruptState when decode wants a unit that is not offered.
    """

    def __init__(
        self, reservation: Reservation, offered: tuple[PageRange, ...], page_size: int
    ) -> None:
        if lacking := difference(reservation.ranges, offered):
            raise CorruptState(f"decode wants {lacking}, the prompt's state is {offered}")
        self.num_superfluous = num_units(difference(offered, reservation.ranges))
        self._page_size = page_size
        self._waiting: dict[UnitName, WantedUnit] = {unit.name: unit for unit in reservation.wanted}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def up_to(self, position: int) -> list[WantedUnit]:
        """Full pages that end at or before `position`."""
        end = position // self._page_size
        return self._take(name for name in self._waiting if name[0] is Kind.FULL and name[1] < end)

    def remaining(self) -> list[WantedUnit]:
        """All other units; the recurrent state last."""
        return self._take(sorted(self._waiting, key=lambda name: (_LAST.index(name[0]), name[1])))

    def _take(self, names: Iterable[UnitName]) -> list[WantedUnit]:
        return [self._waiting.pop(name) for name in list(names)]
