"""A request as the router follows it, from its arrival to the last token.

    received → queued → routed → reserved → prefilling → transferring
             → committed → decoding → finished

Progress comes on two streams, prefill's and decode's, and either may be ahead of the other.
Therefore `reached` walks the path up to any stage that was seen: a first token, for example, proves
a commit, whichever stream reports first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from ferryman.handoff.transitions import follow


class RequestState(StrEnum):
    """The progress of a request."""

    RECEIVED = "received"
    QUEUED = "queued"
    ROUTED = "routed"
    RESERVED = "reserved"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    COMMITTED = "committed"
    DECODING = "decoding"
    MIGRATING = "migrating"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class RequestQueued:
    """The request waits for a worker to have room."""


@dataclass(frozen=True, slots=True)
class Routed:
    """An attempt was sent to workers. After `routed`, it is a retry of one that did not commit."""

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
    """Decode drew a token."""


@dataclass(frozen=True, slots=True)
class Migrated:
    """The decode worker is gone; another attempt goes on after the tokens so far."""


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """The last token was delivered."""


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The client has left, or the request's deadline has passed."""


@dataclass(frozen=True, slots=True)
class Failed:
    """There will be no further attempt; `reason` is the typed reason of the error."""

    reason: str


RequestEvent = (
    RequestQueued
    | Routed
    | Reserved
    | PrefillStarted
    | TransferStarted
    | Committed
    | DecodeStarted
    | Migrated
    | RequestFinished
    | RequestCancelled
    | Failed
)

S = RequestState
_END: dict[type, RequestState] = {RequestCancelled: S.CANCELLED, Failed: S.FAILED}

# Every stage of the next attempt is part of `migrating`, until a token shows that it decodes.
_NEXT_ATTEMPT: dict[type, RequestState] = dict.fromkeys(
    (RequestQueued, Routed, Reserved, PrefillStarted, TransferStarted, Committed), S.MIGRATING
)

# fmt: off
TRANSITIONS: Mapping[RequestState, Mapping[type, RequestState]] = {
    S.RECEIVED:     {RequestQueued: S.QUEUED, **_END},
    S.QUEUED:       {Routed: S.ROUTED, **_END},
    S.ROUTED:       {Reserved: S.RESERVED, Routed: S.ROUTED, RequestQueued: S.QUEUED, **_END},
    S.RESERVED:     {PrefillStarted: S.PREFILLING, Routed: S.ROUTED, **_END},
    S.PREFILLING:   {TransferStarted: S.TRANSFERRING, Routed: S.ROUTED, **_END},
    S.TRANSFERRING: {Committed: S.COMMITTED, Routed: S.ROUTED, **_END},
    S.COMMITTED:    {DecodeStarted: S.DECODING, Migrated: S.MIGRATING, **_END},
    S.DECODING:     {Migrated: S.MIGRATING, RequestFinished: S.FINISHED, **_END},
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
    """Follows the table; raises IllegalTransition. A terminal state stays as it is."""
    return follow(TRANSITIONS, state, event)


def reached(state: RequestState, stage: RequestState) -> RequestState:
    """The state once `stage` of the current attempt was seen. A stage already passed changes
    nothing.

    `stage` is one of routed … decoding. Off the path only decoding changes the state: for a
    migrating request it means that tokens come again.
    """
    assert stage in _PATH, f"{stage} is not a stage that a worker reports"
    if state in _PATH:
        return _PATH[max(_PATH.index(state), _PATH.index(stage))]
    if state is S.MIGRATING and stage is S.DECODING:
        return S.DECODING
    return state
