"""A grant that does not say for every rank where each unit belongs is refused, by what is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ferryman.cache.manifest import Kind
from ferryman.errors import InvalidRequest
from ferryman.handoff.values import Reservation, WantedUnit
from ferryman.wire.codec.handoff import (
    ReserveAnswer,
    reserve_answer_from_wire,
    reserve_answer_to_wire,
)
from ferryman.wire.plane_values import NixlGrant, RankSlabs
from ferryman.wire.v1 import decode_pb2

WANTED = (
    WantedUnit(Kind.FULL, 0, 1),
    WantedUnit(Kind.FULL, 1, 1),
    WantedUnit(Kind.RECURRENT, 9, 1),
)
SLABS = RankSlabs((-1, -1), {Kind.FULL: (1 << 40, 1 << 41), Kind.RECURRENT: (1 << 42, 1 << 43)})
GRANT = NixlGrant("decode.1", b"metadata", SLABS, (4, 5, 0), "digest")
ANSWER = ReserveAnswer(Reservation("res-1", 7, 1, WANTED, 5.0), GRANT)

Forge = Callable[[decode_pb2.NixlGrant], object]


def answered(forge: Forge) -> decode_pb2.ReserveResponse:
    message = reserve_answer_to_wire(ANSWER)
    forge(message.nixl)
    return message


def test_a_grant_of_two_ranks_is_read_as_it_was() -> None:
    assert reserve_answer_from_wire(answered(lambda _: None), 1) == ANSWER


@pytest.mark.parametrize(
    ("forge", "words"),
    [
        pytest.param(lambda n: n.slots.pop(), "2 slots for 3 units", id="a slot too few"),
        pytest.param(lambda n: n.slots.append(1), "4 slots for 3 units", id="a slot too many"),
        pytest.param(
            lambda n: n.slabs[0].addresses.pop(),
            "1 addresses of slabs for 2",
            id="an address too few",
        ),
        pytest.param(lambda n: n.devices.append(-1), "for 3 ranks", id="a rank without slabs"),
        pytest.param(lambda n: n.ClearField("devices"), "0 ranks", id="no rank"),
        pytest.param(lambda n: n.devices.extend([-1] * 63), "65 ranks", id="too many ranks"),
        pytest.param(
            lambda n: (n.ClearField("devices"), n.devices.extend([-1, 0])),
            "all on a host or all on cards",
            id="a host's and a card's memory",
        ),
        pytest.param(
            lambda n: n.slabs.pop(), "recurrent units are wanted", id="a kind without slab"
        ),
        pytest.param(lambda n: n.slabs.append(n.slabs[0]), "named twice", id="a kind twice"),
        pytest.param(
            lambda n: n.slabs[0].addresses.__setitem__(0, 1 << 62),
            "such an address",
            id="no address",
        ),
    ],
)
def test_a_forged_grant_is_refused(forge: Forge, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        reserve_answer_from_wire(answered(forge), 1)
