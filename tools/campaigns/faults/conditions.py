"""Processes that were away or cut off, and whether a request could have been served. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product

FOREVER = float("inf")
# The router uses a worker that is back after its next heartbeat, which comes each second.
GRACE_SECONDS = 3.0
# A router believes that a worker is there for 8 s after its last heartbeat.
SILENT_SECONDS = 6.0
# Longer than any stop of the broker: what ended before has no effect now.
LATELY_SECONDS = 60.0


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
class Condition:
    """One process that is away, or two that cannot reach each other, until it `ended`."""

    names: tuple[str, ...]
    started: float
    ended: float = FOREVER

    @property
    def during(self) -> Interval:
        return Interval(self.started, self.ended)


@dataclass(slots=True)
class Conditions:
    """All of a campaign. `roles` are the processes that stand in for each other."""

    roles: Mapping[str, Sequence[str]]
    past: list[Condition] = field(default_factory=list)

    def begin(self, names: Sequence[str], now: float) -> Condition:
        condition = Condition(tuple(sorted(names)), now)
        self.past.append(condition)
        return condition

    def of(self, *names: str) -> list[Interval]:
        """When exactly these were away or cut from each other."""
        wanted = tuple(sorted(names))
        return [one.during for one in self.past if one.names == wanted]

    def touches(self, name: str, now: float) -> bool:
        """Whether some condition of this process lasts."""
        return any(name in one.names and one.during.contains(now) for one in self.past)

    def unserved(self) -> list[Interval]:
        """When no router could serve a request, by `effective` conditions."""
        effective = effective_conditions(self.past)
        moments = sorted({t for one in effective for t in (one.during.start, one.during.end)})
        return [
            Interval(start, end)
            for start, end in pairwise(moments)
            if not is_served(self.roles, effective, (start + end) / 2)
        ]

    def unserved_by(self, router: str) -> list[Interval]:
        """When this router had no way to serve a request, or was not there itself."""
        alone = {**self.roles, "router": (router,)}
        return Conditions(alone, self.past).unserved()

    def would_serve(self, names: Sequence[str], now: float) -> bool:
        """Whether each router that is there could serve, if these were away or cut as well."""
        lately = [one for one in self.past if one.ended > now - LATELY_SECONDS]
        lasting = [*lately, Condition(tuple(sorted(names)), now)]
        effective = [one for one in effective_conditions(lasting) if one.during.contains(now)]
        # A worker without the broker is away soon, and the plan does not know for how long.
        effective += [
            Condition((worker,), now)
            for one in effective
            if "nats" in one.names and len(one.names) == 2
            for worker in one.names
            if worker != "nats" and worker not in self.roles["router"]
        ]
        gone = {one.names[0] for one in effective if len(one.names) == 1}
        routers = [name for name in self.roles["router"] if name not in gone]
        each = [{**self.roles, "router": (router,)} for router in routers]
        return bool(routers) and all(is_served(alone, effective, now) for alone in each)


def effective_conditions(past: Iterable[Condition]) -> list[Condition]:
    """As others are affected: who comes back is heard of a little later, and, if that was while the
    broker was away, after the broker's own return. Without the broker a process is silent."""
    conditions = list(past)
    broker = [one.during for one in conditions if one.names == ("nats",)]
    effective = []
    for one in conditions:
        end = one.ended
        if len(one.names) == 1 and one.names != ("nats",):
            end = max([end, *(b.end for b in broker if b.contains(end))])
        effective.append(Condition(one.names, one.started, end + GRACE_SECONDS))
        silent_from = one.started + SILENT_SECONDS
        if len(one.names) == 2 and "nats" in one.names and one.ended > silent_from:
            (other,) = (name for name in one.names if name != "nats")
            effective.append(Condition((other,), silent_from, end + GRACE_SECONDS))
    return effective


def is_served(
    roles: Mapping[str, Sequence[str]], conditions: Sequence[Condition], moment: float
) -> bool:
    """Whether some router, prefill and decode worker are there, and reach each other."""
    lasting = {one.names for one in conditions if one.during.contains(moment)}
    there = [[name for name in names if (name,) not in lasting] for names in roles.values()]
    return any(
        not any(tuple(sorted(pair)) in lasting for pair in ((r, p), (r, d), (p, d)))
        for r, p, d in product(*there)
    )
