"""A request as the router follows it, from the door to the last token.

    received → queued → routed → reserved → prefilling → transferring
             → committed → decoding → finished

Progress comes on two streams, prefill's and decode's, and either may be ahead of the other. What
a stage implies is therefore said in one place: `reached` walks the path up to a stage that was
seen, because a first token proves a commit, whoever reports first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from ferryman.handoff.transitions import follow


class RequestState(StrEnum):
    """How far a request has come."""

    RECEIVED = "received"
    QUEUED = "queued"
    ROUTED = "routed"
    RESERVED = "reserved"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    COMMITTED = "committed"
    DECODING = "decoding"
    RETRACTED = "retracted"
    MIGRATING = "migrating"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Queued:
    """The request waits for a worker to have room."""


@dataclass(frozen=True, slots=True)
class Routed:
    """An attempt is on its way to workers. Behind `routed`, a retry of what did not commit."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Reserved:
    """Decode has promised slots."""


@dataclass(frozen=True, slots=True)
class PrefillStarted:
    """The first chunk was planned."""


@dataclass(frozen=True, slots=True)
class TransferStarted:
    """The first page is on its way to decode."""


@dataclass(frozen=True, slots=True)
class Committed:
    """Decode has verified everything: the commit point."""


@dataclass(frozen=True, slots=True)
class DecodeStarted:
    """A token came out of decode."""


@dataclass(frozen=True, slots=True)
class Retracted:
    """Decode pushed the request back to wait for slots."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """Decode took a retracted request up again."""


@dataclass(frozen=True, slots=True)
class Migrated:
    """The decode worker is gone; another attempt goes on behind the tokens there are."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The last token has been delivered."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client is gone or its deadline has passed."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Nobody will try again; `reason` is the typed reason of the error."""

    reason: str


RequestEvent = (
    Queued
    | Routed
    | Reserved
    | PrefillStarted
    | TransferStarted
    | Committed
    | DecodeStarted
    | Retracted
    | Resumed
    | Migrated
    | Finished
    | Cancelled
    | Failed
)

S = RequestState
_END: dict[type, RequestState] = {Cancelled: S.CANCELLED, Failed: S.FAILED}

# Every stage of the next attempt is a part of `migrating`, until a token shows that it decodes.
_NEXT_ATTEMPT: dict[type, RequestState] = dict.fromkeys(
    (Queued, Routed, Reserved, PrefillStarted, TransferStarted, Committed), S.MIGRATING
)

# fmt: off
TRANSITIONS: Mapping[RequestState, Mapping[type, RequestState]] = {
    S.RECEIVED:     {Queued: S.QUEUED, **_END},
    S.QUEUED:       {Routed: S.ROUTED, **_END},
    S.ROUTED:       {Reserved: S.RESERVED, Routed: S.ROUTED, Queued: S.QUEUED, **_END},
    S.RESERVED:     {PrefillStarted: S.PREFILLING, Routed: S.ROUTED, **_END},
    S.PREFILLING:   {TransferStarted: S.TRANSFERRING, Routed: S.ROUTED, **_END},
    S.TRANSFERRING: {Committed: S.COMMITTED, Routed: S.ROUTED, **_END},
    S.COMMITTED:    {DecodeStarted: S.DECODING, Migrated: S.MIGRATING, **_END},
    S.DECODING:     {Retracted: S.RETRACTED, Migrated: S.MIGRATING, Finished: S.FINISHED, **_END},
    S.RETRACTED:    {Resumed: S.DECODING, Migrated: S.MIGRATING, **_END},
    S.MIGRATING:    {DecodeStarted: S.DECODING, **_NEXT_ATTEMPT, **_END},
    S.FINISHED:     {},
    S.CANCELLED:    {},
    S.FAILED:       {},
}
# fmt: on

_PATH = (
    S.ROUTED,
    S.RESERVED,
    S.PREFILLING,
    S.TRANSFERRING,
    S.COMMITTED,
    S.DECODING,
)


def next_state(state: RequestState, event: RequestEvent) -> RequestState:
    """Follows the table; raises IllegalTransition, and stays where it is in a terminal state."""
    return follow(TRANSITIONS, state, event)


def reached(state: RequestState, stage: RequestState) -> RequestState:
    """The state once `stage` of the current attempt was seen; a stage already passed is no news.

    `stage` is one of routed … decoding. Off the path only decoding is news: to a retracted or
    migrating request it says that tokens come again.
    """
    assert stage in _PATH, f"{stage} is not a stage that a worker reports"
    if state in _PATH:
        return _PATH[max(_PATH.index(state), _PATH.index(stage))]
    if state in (S.RETRACTED, S.MIGRATING) and stage is S.DECODING:
        return S.DECODING
    return state
