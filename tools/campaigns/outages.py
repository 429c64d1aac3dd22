"""When a cluster could not serve, by what was done to its processes. Pure: `now` comes in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Interval:
    """From `start` to `end`, in monotonic seconds."""

    start: float
    end: float

    def overlaps(self, other: Interval) -> bool:
        return self.start <= other.end and other.start <= self.end

    def contains(self, moment: float) -> bool:
        return self.start <= moment <= self.end


@dataclass(slots=True)
class Absences:
    """Processes by name, and when each was stopped, or dead and not yet back."""

    names: Sequence[str]
    _since: dict[str, float] = field(default_factory=dict)
    _over: dict[str, list[Interval]] = field(default_factory=dict)

    def is_away(self, name: str) -> bool:
        return name in self._since

    def left(self, name: str, now: float) -> None:
        self._since.setdefault(name, now)

    def came_back(self, name: str, now: float) -> None:
        self._over.setdefault(name, []).append(Interval(self._since.pop(name), now))

    def of(self, name: str, now: float) -> list[Interval]:
        """All absences of one process, the one under way until `now`."""
        running = [Interval(self._since[name], now)] if name in self._since else []
        return [*self._over.get(name, []), *running]


def outages(
    absences: Absences,
    roles: Mapping[str, Sequence[str]],
    now: float,
    grace: float,
    broker: Sequence[Interval] = (),
) -> list[Interval]:
    """When all processes of some role were away at once, each for `grace` seconds longer.

    The grace is what it takes until the others have noticed that one is back. They do so by the
    broker: what comes back while that is away (`broker` says when) is away as long.
    """
    found = []
    for names in roles.values():
        together = _unheard(absences.of(names[0], now), broker)
        for name in names[1:]:
            together = _common(together, _unheard(absences.of(name, now), broker))
        found += [Interval(one.start, one.end + grace) for one in together]
    return found


def _unheard(away: Sequence[Interval], broker: Sequence[Interval]) -> list[Interval]:
    return [
        Interval(one.start, max([one.end, *(b.end for b in broker if b.contains(one.end))]))
        for one in away
    ]


def _common(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    pairs = ((one, other) for one in some for other in others if one.overlaps(other))
    return [Interval(max(a.start, b.start), min(a.end, b.end)) for a, b in pairs]
