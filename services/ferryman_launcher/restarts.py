"""Decides how long a process that ended waits for its next start. Pure.

No process is given up: one that dies again and again is started less and less often, so a fault
that goes away, or a request that kills workers, costs the cluster time and not its life.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """The back-off: a pause doubles with each death in a row, from `first_seconds` up to
    `most_seconds`.

    After a process that refuses its settings the pause is `refused_seconds` or more. A process
    that was ready for `calm_seconds` begins a new row. A process is in a crash loop from
    `loop_deaths` deaths in a row on. A start has failed if it makes no progress for
    `standstill_seconds`.
    """

    first_seconds: float = 0.1
    refused_seconds: float = 5.0
    most_seconds: float = 30.0
    calm_seconds: float = 30.0
    loop_deaths: int = 5
    standstill_seconds: float = 120.0


@dataclass(frozen=True, slots=True)
class LifeEnd:
    """The end of one life of a process, or of a start that failed: then `ready_seconds` is 0.

    `reason` says how it ended. `last_lines` are the end of its output, if `reason` lacks them.
    """

    reason: str
    ready_seconds: float = 0.0
    is_refusal: bool = False
    last_lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Restart:
    """The next start comes after a pause; `num_deaths` is the length of the row so far."""

    num_deaths: int
    pause_seconds: float
    is_crash_loop: bool


def next_restart(limits: RestartLimits, num_deaths: int, end: LifeEnd) -> Restart:
    """Decides after `end`, which came after `num_deaths` others in a row."""
    was_calm = end.ready_seconds >= limits.calm_seconds
    number = 1 if was_calm else num_deaths + 1
    # The exponent is bounded, or the power of a process that died all night would be no float.
    pause = limits.first_seconds * 2.0 ** min(number - 1, 32)
    if end.is_refusal:
        pause = max(pause, limits.refused_seconds)
    return Restart(number, min(pause, limits.most_seconds), number >= limits.loop_deaths)
