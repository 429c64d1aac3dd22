"""How an attempt ended, and what that means for the request. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ferryman.errors import (
    Cancelled,
    CorruptState,
    DeadlineExceeded,
    Exhausted,
    FerrymanError,
    InvalidRequest,
    LeaseLost,
    ManifestMismatch,
    NotFound,
    QueueFull,
    Stale,
    TooLarge,
    Unavailable,
    UnknownModel,
    WrongEpoch,
)
from ferryman.schedule.request import FinishReason
from ferryman.wire.values import Failure, Usage


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


_BY_NAME = {
    kind.__name__: kind
    for kind in (
        Cancelled,
        CorruptState,
        DeadlineExceeded,
        LeaseLost,
        NotFound,
        Stale,
        Unavailable,
        WrongEpoch,
    )
}
_INVALID = {kind.__name__: kind for kind in (InvalidRequest, TooLarge, UnknownModel)}


def error_of(failure: Failure) -> FerrymanError:
    """The error that a worker put into a frame; what is not known here is the worker's bug."""
    if failure.code == "RESOURCE_EXHAUSTED":
        kind = QueueFull if failure.reason == "QueueFull" else Exhausted
        return kind(failure.message, failure.retry_after_seconds or 1.0)
    if failure.reason in _INVALID:
        return _INVALID[failure.reason](failure.message, failure.param)
    if failure.reason == "ManifestMismatch":
        return ManifestMismatch((failure.message,))
    return _BY_NAME.get(failure.reason, FerrymanError)(failure.message)
