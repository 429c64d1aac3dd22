"""Prefill's side of a hand-off: how long its slots must stay unchanged.

    state      event → state
    held       a send starts → sending · decode answered, lease over, cancelled → released
    sending    the last send ends → held · decode answered, lease over, cancelled → stopping
    stopping   the last send ends → released
    released   absorbing

A hold is one lease `transfer out` on the slots of one reservation; slots sent to several
reservations have as many leases, and are free when the last of them is gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from ferryman.errors import QueueFull
from ferryman.handoff.transitions import follow


class HoldState(StrEnum):
    """Whether prefill's slots are still needed, and whether a send still reads them."""

    HELD = "held"
    SENDING = "sending"
    STOPPING = "stopping"
    RELEASED = "released"


@dataclass(frozen=True, slots=True)
class SendStarted:
    """The first of one or more sends reads the slots."""


@dataclass(frozen=True, slots=True)
class SendEnded:
    """No send reads the slots any more."""


@dataclass(frozen=True, slots=True)
class Answered:
    """Decode reported the end of the reservation: committed, failed or given up."""


@dataclass(frozen=True, slots=True)
class HoldLeaseEnded:
    """The reservation's lease has ended by prefill's own monotonic clock."""


@dataclass(frozen=True, slots=True)
class HoldCancelled:
    """The router gave up the attempt."""


HoldEvent = SendStarted | SendEnded | Answered | HoldLeaseEnded | HoldCancelled

S = HoldState
_OVER = (Answered, HoldLeaseEnded, HoldCancelled)

# fmt: off
TRANSITIONS: Mapping[HoldState, Mapping[type, HoldState]] = {
    S.HELD:     {SendStarted: S.SENDING, **dict.fromkeys(_OVER, S.RELEASED)},
    S.SENDING:  {SendEnded: S.HELD, **dict.fromkeys(_OVER, S.STOPPING)},
    S.STOPPING: {SendEnded: S.RELEASED, **dict.fromkeys(_OVER, S.STOPPING)},
    S.RELEASED: {},
}
# fmt: on


@dataclass(frozen=True, slots=True)
class Hold:
    """Slots of one attempt that are kept for one reservation of decode process `decode_epoch`."""

    request_id: str
    attempt: int
    reservation_id: str
    decode_epoch: int
    lease_seconds: float


@dataclass(frozen=True, slots=True)
class StopSending:
    """These bytes are not needed any more: end the sends, then report `send_ended`."""

    hold: Hold


@dataclass(frozen=True, slots=True)
class ReleaseHold:
    """Release the lease `transfer out`: no send reads the slots."""

    hold: Hold


HoldEffect = StopSending | ReleaseHold


@dataclass(slots=True)
class _HeldRequest:
    hold: Hold
    lease_end: float
    state: HoldState = HoldState.HELD
    num_sends: int = 0


class HoldTable:
    """All holds of one prefill worker, by reservation id. Calls for unknown ones do nothing."""

    def __init__(self, max_holds: int = 4096) -> None:
        self._max_holds = max_holds
        self._entries: dict[str, _HeldRequest] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def hold(self, hold: Hold, now: float) -> None:
        """Starts a hold, with the reservation; raises QueueFull at the bound."""
        assert hold.reservation_id not in self._entries, "a reservation is held once"
        if len(self._entries) >= self._max_holds:
            raise QueueFull(f"{self._max_holds} hand-offs are being held")
        self._entries[hold.reservation_id] = _HeldRequest(hold, now + hold.lease_seconds)

    def try_send(self, reservation_id: str, now: float) -> bool:
        """Whether a send may begin to read the slots; the caller ends each such send by
        `send_ended`."""
        entry = self._entries.get(reservation_id)
        if entry is None or entry.state is S.STOPPING or now >= entry.lease_end:
            return False
        entry.num_sends += 1
        if entry.num_sends == 1:
            self._apply(entry, SendStarted())
        return True

    def send_ended(self, reservation_id: str) -> tuple[HoldEffect, ...]:
        """One send has read its last byte, with any result."""
        entry = self._entries[reservation_id]
        assert entry.num_sends > 0, f"more sends of {reservation_id} ended than began"
        entry.num_sends -= 1
        return () if entry.num_sends else self._apply(entry, SendEnded())

    def renew(self, reservation_id: str, now: float) -> None:
        """Decode accepted a write: the reservation's lease starts anew."""
        entry = self._entries.get(reservation_id)
        if entry is not None:
            entry.lease_end = now + entry.hold.lease_seconds

    def answered(self, reservation_id: str, decode_epoch: int) -> tuple[HoldEffect, ...]:
        """Decode's answer. It counts only from the process that made the reservation."""
        entry = self._entries.get(reservation_id)
        if entry is None or entry.hold.decode_epoch != decode_epoch:
            return ()
        return self._apply(entry, Answered())

    def cancel(self, request_id: str, attempt: int) -> tuple[HoldEffect, ...]:
        """Ends every hold of one attempt."""
        name = request_id, attempt
        holds = [e for e in self._entries.values() if (e.hold.request_id, e.hold.attempt) == name]
        return tuple(effect for entry in holds for effect in self._apply(entry, HoldCancelled()))

    def expire(self, now: float) -> tuple[HoldEffect, ...]:
        over = [entry for entry in self._entries.values() if now >= entry.lease_end]
        return tuple(effect for entry in over for effect in self._apply(entry, HoldLeaseEnded()))

    def _apply(self, entry: _HeldRequest, event: HoldEvent) -> tuple[HoldEffect, ...]:
        before, entry.state = entry.state, follow(TRANSITIONS, entry.state, event)
        if entry.state is before:
            return ()
        if entry.state is S.STOPPING:
            return (StopSending(entry.hold),)
        if entry.state is S.RELEASED:
            del self._entries[entry.hold.reservation_id]
            return (ReleaseHold(entry.hold),)
        return ()
