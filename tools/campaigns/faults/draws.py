"""The next fault and its victim, drawn at random. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from tools.campaigns.faults.processes import ROLES, WORKERS, role_of


class FaultKind(StrEnum):
    """The ways in which something is taken away."""

    KILL = "SIGKILL"
    STOP = "SIGSTOP"
    DRAIN = "SIGTERM"
    CUT = "partition"
    FULL = "full disk"


@dataclass(frozen=True, slots=True)
class Draw:
    """A fault of a kind for `seconds`, where that has a length.

    With `stages` it strikes the publisher of the next event that begins one of these; else one of
    `names`, at once.
    """

    kind: FaultKind
    seconds: float
    stages: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    @property
    def is_loss(self) -> bool:
        """Whether a router may take it for the death of a worker."""
        return self.kind is FaultKind.KILL or (
            self.kind in (FaultKind.STOP, FaultKind.CUT) and self.seconds > PATIENCE_SECONDS
        )


# A router asks a silent worker for this long, and somewhat longer, before it takes it for dead.
PATIENCE_SECONDS = 1.5
MIN_SECONDS, MAX_SECONDS, MAX_FULL_SECONDS = 0.3, 20.0, 10.0
# One fault in so many may take the last process of a role away.
DEEP_SHARE = 0.02
PREFILLS = ("queued", "prefetching", "prefetched", "admitted", "prefilling")
DECODES = ("reserved", "loaded", "committed", "decoding", "retracted", "resumed")
# Shares in percent: kinds at a named stage.
_STAGED = (
    (14.0, FaultKind.KILL, PREFILLS),
    (12.0, FaultKind.STOP, PREFILLS),
    (14.0, FaultKind.KILL, DECODES),
    (12.0, FaultKind.STOP, DECODES),
    (3.0, FaultKind.KILL, ("received", "routed")),
    (5.0, FaultKind.STOP, ("received", "routed")),
    (2.0, FaultKind.DRAIN, PREFILLS),
    (5.0, FaultKind.DRAIN, DECODES),
    (2.0, FaultKind.KILL, ("moving",)),
    (2.0, FaultKind.STOP, ("moving",)),
    (1.5, FaultKind.KILL, ("loaded from the host", "stored in the host")),
    (2.5, FaultKind.STOP, ("loaded from the host", "stored in the host")),
    (9.0, FaultKind.CUT, (*PREFILLS, *DECODES, "received", "routed")),
)
_AT_ONCE = (
    (2.0, FaultKind.KILL, ("nats",)),
    (3.0, FaultKind.STOP, ("nats",)),
    (1.5, FaultKind.KILL, ("redis",)),
    (1.5, FaultKind.STOP, ("redis",)),
    (2.5, FaultKind.FULL, ("disk",)),
    (1.0, FaultKind.CUT, ()),
)


def draw(rng: random.Random) -> Draw:
    """The next fault; of its seconds half are below one, and one in ten above eight."""
    rows = (*_STAGED, *_AT_ONCE)
    number = rng.choices(range(len(rows)), [row[0] for row in rows])[0]
    _, kind, wanted = rows[number]
    most = MAX_FULL_SECONDS if kind is FaultKind.FULL else MAX_SECONDS
    seconds = MIN_SECONDS * (most / MIN_SECONDS) ** (rng.random() ** 1.8)
    if number >= len(_STAGED):
        return Draw(kind, seconds, names=wanted)
    # One stage, so that those that last for a moment are hit as often as the long ones.
    return Draw(kind, seconds, stages=(rng.choice(wanted),))


def widened(wanted: Draw) -> Draw:
    """The same fault at any stage of that role, because the one that was drawn did not come."""
    for _, kind, stages in _STAGED:
        if kind is wanted.kind and wanted.stages[0] in stages and len(stages) > 1:
            return Draw(wanted.kind, wanted.seconds, stages)
    return Draw(wanted.kind, wanted.seconds, (*PREFILLS, *DECODES))


def partners(name: str) -> Sequence[str]:
    """The processes that a process speaks with: a partition from others would mean nothing."""
    beyond = ("nats", "redis", "hostcache")
    match role_of(name):
        case "router":
            return (*WORKERS, "nats", "redis")
        case "prefill":
            return (*ROLES["decode"], *ROLES["router"], *beyond)
        case "decode":
            return (*ROLES["prefill"], *ROLES["router"], *beyond)
        case "hostcache":
            return (*WORKERS, "nats", "redis")
    return ()
