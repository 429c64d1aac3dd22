"""Rows 8, 9, 30 and 37: decode's list and prefill's differ at either end, by any number of units.

Through the tables of both sides and the messages between them. Where decode has a prefix of its
own its list begins later; where a page is rounded, or prefill computed a longer prompt, one ends
later. Equal pages are paired, what decode requires must come, what it does not is skipped and
counted, and a reservation is the same after any number of attempts at it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest

from ferryman.cache.manifest import Kind
from ferryman.errors import CorruptState, LeaseLost
from ferryman.handoff.commit_check import Gaps, Verified
from ferryman.handoff.effects import (
    CommitAnswer,
    ReceiverLimits,
    StartDecoding,
    WriteFence,
    WriterId,
)
from ferryman.handoff.holder import Hold, HoldTable
from ferryman.handoff.offer import UnitsToSend
from ferryman.handoff.receiver import ReservationTable
from ferryman.handoff.values import (
    PageRange,
    Reservation,
    UnitDigest,
    UnitName,
    WantedUnit,
    ranges_of,
    units_of,
)
from ferryman.schedule.batch import Sampled
from ferryman.wire.codec.handoff import (
    ReserveAnswer,
    commit_order_from_wire,
    commit_order_to_wire,
    reserve_answer_from_wire,
    reserve_answer_to_wire,
)
from ferryman.wire.values import CommitOrder, RequestContext, Usage

EPOCH, MOST = 7, 4
PREFILL = WriterId("prefill-00000001", 5)
LENGTHS = list(product(range(MOST + 1), range(MOST + 1)))
"""(units lacking at the front, at the end) of MOST + 1 pages."""

Span = tuple[int, int]


def names_of(kind: Kind, lacking: Span) -> set[UnitName]:
    """Pages 3 to 3 + MOST without the given numbers of pages at the front and at the end."""
    return {(kind, index) for index in range(3 + lacking[0], 4 + MOST - lacking[1])}


@dataclass
class DecodeLists:
    """Decode's table, with one reservation of exactly these units, each in a slot of its own."""

    wanted: set[UnitName]

    def __post_init__(self) -> None:
        self.table = ReservationTable(EPOCH, ReceiverLimits())
        units = [WantedUnit(kind, index, 10 + index) for kind, index in sorted(self.wanted)]
        self.reservation = Reservation("res", EPOCH, 1, tuple(units), 5.0)
        assert self.table.offer("req", self.reservation, PREFILL, 0.0) == ()
        self.slots: dict[UnitName, str] = {}

    def answer(self) -> Reservation:
        """The reservation as prefill reads it from the answer to its Reserve."""
        message = reserve_answer_to_wire(ReserveAnswer(self.reservation))
        return reserve_answer_from_wire(message, attempt=1).reservation

    def write(self, fence: WriteFence, unit: WantedUnit, content: str) -> None:
        if self.table.try_write(fence, unit, 1.0):
            self.slots[unit.name] = content
            self.table.record(fence, digest_of(unit.name, content), 1.0)

    def commit(self, fence: WriteFence, sent: list[UnitDigest]) -> CommitAnswer:
        order = CommitOrder(
            context=RequestContext("req", 1, deadline_seconds=9.0),
            reservation_id="res",
            epoch=EPOCH,
            written=ranges_of(digest.name for digest in sent),
            digests=tuple(sent),
            first=Sampled(3, {}),
            usage=Usage(prompt_tokens=9),
        )
        heard = commit_order_from_wire(commit_order_to_wire(order))
        return self.table.commit(fence, heard.written, heard.digests, 2.0)


def digest_of(name: UnitName, content: str) -> UnitDigest:
    return UnitDigest(*name, content.encode().ljust(16, b".")[:16])


def content_of(name: UnitName) -> str:
    return f"{name[0].value[:4]} {name[1]}"


def fence_of(reservation: Reservation) -> WriteFence:
    return WriteFence(reservation.epoch, reservation.reservation_id, reservation.attempt)


def hand_over(
    decode: DecodeLists, offered: tuple[PageRange, ...]
) -> tuple[UnitsToSend, CommitAnswer]:
    """As prefill does it: what is wanted leaves once, while it is held."""
    reservation = decode.answer()
    holds = HoldTable()
    holds.hold(Hold("req", 1, "res", EPOCH, 5.0), 0.0)
    outgoing = UnitsToSend(reservation, offered, page_size=4)
    assert holds.try_send("res", 1.0)
    sent = []
    for unit in [*outgoing.up_to(4 * 5), *outgoing.remaining()]:
        decode.write(fence_of(reservation), unit, content_of(unit.name))
        sent.append(digest_of(unit.name, content_of(unit.name)))
    assert holds.send_ended("res") == ()
    answer = decode.commit(fence_of(reservation), sent)
    assert len(holds.answered("res", EPOCH)) == 1
    return outgoing, answer


STATES = [(), ((Kind.RECURRENT, 40),)]


@pytest.mark.parametrize("kind", [Kind.FULL, Kind.WINDOW])
@pytest.mark.parametrize("wants", LENGTHS, ids=lambda span: f"decode lacks {span[0]} {span[1]}")
def test_lists_that_differ_at_either_end_pair_equal_units_or_fail(kind: Kind, wants: Span) -> None:
    for offers, state in product(LENGTHS, STATES):
        wanted = names_of(kind, wants) | set(state)
        offered = ranges_of(names_of(kind, offers) | {(Kind.RECURRENT, 40)})
        decode = DecodeLists(wanted)
        before = repr(decode.reservation), decode.answer()
        if wanted - set(units_of(offered)):
            for _ in range(2):
                with pytest.raises(CorruptState, match="decode wants"):
                    hand_over(decode, offered)
        else:
            outgoing, answer = hand_over(decode, offered)
            assert answer.verdict == Verified(0)
            assert [type(effect) for effect in answer.effects] == [StartDecoding]
            assert decode.slots == {name: content_of(name) for name in wanted}
            assert outgoing.num_superfluous == len(set(units_of(offered)) - wanted)
        assert (repr(decode.reservation), decode.answer()) == before


@pytest.mark.parametrize("kind", [Kind.FULL, Kind.WINDOW])
@pytest.mark.parametrize("wants", LENGTHS, ids=lambda span: f"decode lacks {span[0]} {span[1]}")
def test_a_writer_that_sends_all_it_has_is_taken_by_name_and_counted(
    kind: Kind, wants: Span
) -> None:
    """It knows the generations of what it was promised, and guesses the others'."""
    for offers in LENGTHS:
        wanted, offered = names_of(kind, wants), names_of(kind, offers)
        if not wanted:
            continue
        decode = DecodeLists(wanted)
        known = {unit.name: unit.slot_generation for unit in decode.answer().wanted}
        fence, sent = fence_of(decode.reservation), []
        for name in sorted(offered):
            decode.write(fence, WantedUnit(*name, known.get(name, 11)), content_of(name))
            sent.append(digest_of(name, content_of(name)))
        answer = decode.commit(fence, sent)
        assert decode.slots == {name: content_of(name) for name in wanted & offered}
        assert decode.table.statistics().num_skipped_units == len(offered - wanted)
        if missing := wanted - offered:
            assert answer.verdict == Gaps(ranges_of(missing))
        else:
            assert answer.verdict == Verified(len(offered - wanted))
        assert decode.commit(fence, sent) == CommitAnswer(answer.verdict, ()), "as the first time"


def test_row_30_a_second_writer_of_the_first_token_is_not_heard() -> None:
    """Only the commit carries it; a later commit, or one of another writer, changes nothing."""
    decode = DecodeLists(names_of(Kind.FULL, (0, 0)))
    others = [
        WriteFence(EPOCH, "res", 2),
        WriteFence(EPOCH, "other", 1),
    ]
    for fence in others:
        with pytest.raises(LeaseLost):
            decode.commit(fence, [])
    _, answer = hand_over(decode, ranges_of(decode.wanted))
    assert answer.verdict == Verified(0)
    again = decode.commit(fence_of(decode.reservation), [])
    assert again == CommitAnswer(Verified(0), ()), "the first word counts, and starts it once"
