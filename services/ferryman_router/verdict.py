"""How an attempt ended, and what that means for the request. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ferryman.errors import (
    DeadlineExceeded,
    Exhausted,
    FerrymanError,
    InvalidRequest,
    ManifestMismatch,
    NotFound,
    Unavailable,
)
from ferryman.schedule.request import FinishReason
from ferryman.wire.values import Usage


class WorkerGone(Unavailable):
    """The worker stopped answering: it died, or the way to it did."""


class Suspect(Unavailable):
    """This request was running when two workers died; it is not given to a third."""


class RetriesExhausted(Unavailable):
    """It was tried as often as one request, or all together, may be."""


@dataclass(frozen=True, slots=True)
class Done:
    """The last token is here; `usage` as the worker counted it."""

    reason: FinishReason
    usage: Usage


@dataclass(frozen=True, slots=True)
class Stopped:
    """A stop string: the router knows the end, the worker is yet to be told."""


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """No room there: nothing happened, and it may be tried elsewhere or later."""

    error: Exhausted


@dataclass(frozen=True, slots=True)
class Spoiled:
    """This attempt is lost; another may do better."""

    error: FerrymanError

    @property
    def is_death(self) -> bool:
        return isinstance(self.error, WorkerGone)


@dataclass(frozen=True, slots=True)
class Hopeless:
    """Every attempt would end like this."""

    error: FerrymanError


Verdict = Done | Stopped | TurnedAway | Spoiled | Hopeless

_HOPELESS = (InvalidRequest, ManifestMismatch, DeadlineExceeded, NotFound)


def judge(error: FerrymanError) -> Verdict:
    """What a worker's refusal or failure means for the request."""
    if isinstance(error, Exhausted):
        return TurnedAway(error)
    return Hopeless(error) if isinstance(error, _HOPELESS) else Spoiled(error)
