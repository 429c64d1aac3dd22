"""The law of the lifecycle log: legal under any interleaving, and every breach is named."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferryman.handoff.lifecycle import (
    FOLLOWS,
    NEEDS,
    START,
    LifecycleEvent,
    Violation,
    check,
    is_over,
)


def said(role: str, *names: str, attempt: int = 1, first_seq: int = 1) -> list[LifecycleEvent]:
    return [
        LifecycleEvent(role, f"{role}-1", 5, "req-1", attempt, seq, name, {})
        for seq, name in enumerate(names, first_seq)
    ]


def gap(role: str, first: int, last: int) -> LifecycleEvent:
    facts = {"from": first, "to": last}
    return LifecycleEvent(role, f"{role}-1", 5, "req-1", 1, last + 1, "gap", facts)


ROUTER = said("router", "received", "routed", "finished")
PREFILL = said("prefill", "queued", "admitted", "chunk", "chunk", "handed_off")
DECODE = said("decode", "reserved", "verified", "first_token", "progress", "finished")
WHOLE = [*ROUTER, *PREFILL, *DECODE]


def rules(events: list[LifecycleEvent]) -> list[str]:
    return [violation.rule for violation in check(events)]


@given(st.randoms(use_true_random=False))
def test_a_whole_life_is_legal_in_any_interleaving(rng: random.Random) -> None:
    shuffled = WHOLE[:]
    rng.shuffle(shuffled)
    assert check(shuffled) == []
    assert is_over(shuffled)


def test_requests_do_not_disturb_each_other() -> None:
    other = [replace(event, request_id="req-2") for event in WHOLE[:-1]]
    assert check([*other, *WHOLE]) == []


def test_a_retracted_and_resumed_request_is_legal() -> None:
    names = ["reserved", "verified", "first_token", "retracted", "resumed", "progress", "finished"]
    assert check([*ROUTER, *PREFILL, *said("decode", *names)]) == []


def test_a_migrated_request_is_legal_though_its_first_worker_died_unheard() -> None:
    router = [
        *said("router", "received", "routed"),
        *said("router", "migrated", "routed", "finished", attempt=2, first_seq=3),
    ]
    second = [replace(event, attempt=2, seq=event.seq + 5) for event in PREFILL]
    decode = [replace(event, attempt=2, worker_id="decode-2") for event in DECODE]
    assert check([*router, *PREFILL, *second, *decode]) == []


@pytest.mark.parametrize("end", ["failed", "cancelled"])
def test_a_request_that_was_ended_owes_no_causes(end: str) -> None:
    assert check([*said("router", "received", "routed", end), *PREFILL]) == []


def test_order_within_a_publisher_is_by_its_numbers() -> None:
    wrong = said("decode", "reserved", "first_token", "verified", "finished")
    found = check([*ROUTER, *PREFILL, *wrong])
    assert {violation.rule for violation in found} == {"illegal_order"}
    first = Violation("req-1", 1, "illegal_order", "decode.first_token of decode-1 after reserved")
    assert found[0] == first


def test_nothing_follows_an_end_even_across_a_gap() -> None:
    late = LifecycleEvent("decode", "decode-1", 5, "req-1", 1, 9, "progress", {})
    assert rules([*WHOLE, gap("decode", 6, 7), late]) == ["illegal_order"]


def test_a_gap_excuses_what_it_covers() -> None:
    finished = LifecycleEvent("decode", "decode-1", 5, "req-1", 1, 5, "finished", {})
    assert check([*ROUTER, *PREFILL, *DECODE[:1], gap("decode", 2, 3), finished]) == []


def test_an_absent_number_without_a_gap_is_named() -> None:
    assert "missing_seq" in rules([*ROUTER, *PREFILL, *DECODE[:2], *DECODE[3:]])


def test_a_gap_at_the_wrong_place_is_named() -> None:
    odd = replace(gap("prefill", 6, 6), seq=9)
    assert rules([*WHOLE, odd]) == ["bad_gap"]


def test_a_repeated_number_is_named() -> None:
    assert "repeated_seq" in rules([*WHOLE, DECODE[3]])


@pytest.mark.parametrize(
    ("event", "needs"), NEEDS.items(), ids=[f"{role}.{name}" for role, name in NEEDS]
)
def test_an_event_without_its_cause_is_named(
    event: tuple[str, str], needs: tuple[tuple[str, str], ...]
) -> None:
    log = [one for one in WHOLE if (one.role, one.name) not in needs]
    found = [violation for violation in check(log) if violation.rule == "missing_cause"]
    assert any(violation.detail.startswith(".".join(event)) for violation in found)


def test_two_workers_cannot_take_over_one_attempt() -> None:
    twin = [replace(event, worker_id="decode-2") for event in DECODE[:2]]
    assert rules([*WHOLE, *twin]) == ["two_decoders"]


def test_the_routers_attempts_only_go_up() -> None:
    router = [replace(ROUTER[0], attempt=2), *ROUTER[1:]]
    assert "attempt_went_back" in rules([*router, *PREFILL, *DECODE])


def test_words_outside_the_vocabulary_are_named() -> None:
    assert rules([replace(WHOLE[0], role="poet"), *WHOLE]) == ["unknown_event"]
    assert rules([*WHOLE, *said("router", "sang", first_seq=4)]) == ["unknown_event"]


def test_a_request_under_way_is_not_over() -> None:
    assert not is_over([*ROUTER[:2], *PREFILL, *DECODE, gap("router", 3, 3)])


@given(st.sampled_from(sorted(FOLLOWS)), st.data())
def test_every_walk_through_a_table_is_legal_in_itself(role: str, data: st.DataObject) -> None:
    names: list[str] = []
    name = START
    while FOLLOWS[role][name] and len(names) < 12:
        name = data.draw(st.sampled_from(FOLLOWS[role][name]))
        names.append(name)
    assert not {"illegal_order", "missing_seq"} & set(rules(said(role, *names)))
