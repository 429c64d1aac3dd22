"""How quickly one answer comes: time to its first token, and the gaps between tokens. Pure."""

from __future__ import annotations

from array import array


class Pace:
    """Times are monotonic seconds; a gap is counted once for every token that ended it."""

    __slots__ = ("_arrived", "_gaps", "_last", "first_seconds")

    def __init__(self, arrived: float) -> None:
        self._arrived = self._last = arrived
        self._gaps = array("f")
        self.first_seconds: float | None = None

    def tokens(self, num_tokens: int, now: float) -> float:
        """Counts tokens that came together; returns the seconds since the ones before."""
        gap, self._last = now - self._last, now
        if self.first_seconds is None:
            self.first_seconds = gap
            return gap
        share = gap / num_tokens
        for _ in range(num_tokens):
            self._gaps.append(share)
        return share

    def gap_quantile(self, quantile: float) -> float:
        if not self._gaps:
            return 0.0
        ordered = sorted(self._gaps)
        return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]
