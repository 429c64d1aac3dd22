"""The outbox keeps within its bounds what must go, and drops the oldest of what ages."""

from __future__ import annotations

import pytest

from ferryman.errors import QueueFull
from ferryman.wire.nats.outbox import OutboundMessage, Outbox


def message(number: int) -> OutboundMessage:
    return OutboundMessage("s", b"%d" % number)


def everything(outbox: Outbox) -> list[bytes]:
    return [taken.payload for taken in iter(outbox.take, None)]


def test_what_is_kept_goes_first_and_in_order() -> None:
    outbox = Outbox()
    outbox.offer(message(9))
    outbox.keep(message(1))
    outbox.keep(message(2))
    assert len(outbox) == 3
    assert everything(outbox) == [b"1", b"2", b"9"]


def test_a_full_lane_refuses_what_must_be_kept() -> None:
    outbox = Outbox(max_kept=1)
    outbox.keep(message(1))
    with pytest.raises(QueueFull):
        outbox.keep(message(2))
    assert (outbox.num_refused, everything(outbox)) == (1, [b"1"])


def test_of_what_is_offered_the_oldest_is_dropped() -> None:
    outbox = Outbox(max_offered=2)
    for number in range(5):
        outbox.offer(message(number))
    assert (outbox.num_dropped, everything(outbox)) == (3, [b"3", b"4"])


def test_what_is_given_back_is_next() -> None:
    outbox = Outbox()
    outbox.keep(message(1))
    outbox.keep(message(2))
    taken = outbox.take()
    assert taken is not None
    outbox.give_back(taken)
    assert everything(outbox) == [b"1", b"2"]
