"""The law of the lifecycle log: legal under any interleaving, and every breach is named."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferryman.handoff.lifecycle import (
    FOLLOWS,
    NEEDS,
    START,
    LifecycleEntry,
    Violation,
    check,
    is_over,
)


def said(role: str, *names: str, attempt: int = 1, first_seq: int = 1) -> list[LifecycleEntry]:
    return [
        LifecycleEntry(role, f"{role}-1", 5, "req-1", attempt, seq, name, {})
        for seq, name in enumerate(names, first_seq)
    ]


def gap(role: str, first: int, last: int) -> LifecycleEntry:
    facts = {"from": first, "to": last}
    return LifecycleEntry(role, f"{role}-1", 5, "req-1", 1, last + 1, "gap", facts)


ROUTER = said("router", "received", "routed", "finished")
PREFILL = said("prefill", "queued", "admitted", "chunk", "chunk", "handed_off")
DECODE = said("decode", "reserved", "verified", "first_token", "progress", "finished")
WHOLE = [*ROUTER, *PREFILL, *DECODE]
TAKER = said("decode", "reserved", "verified", "first_token", "finished", attempt=2)
# The request leaves its decode worker, which hands it off in the next attempt.
MOVED = [
    *said("router", "received", "routed"),
    *said("router", "migrated", "routed", "finished", attempt=2, first_seq=3),
    *PREFILL,
    *said("decode", "reserved", "verified", "first_token", "detached"),
    *said("decode", "moving", "handed_off", attempt=2, first_seq=5),
    *(replace(event, worker_id="decode-2") for event in TAKER),
]


def rules(events: list[LifecycleEntry]) -> list[str]:
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


def test_a_request_of_which_decode_loaded_a_part_is_legal() -> None:
    names = ["reserved", "loaded", "verified", "first_token", "finished"]
    assert check([*ROUTER, *PREFILL, *said("decode", *names)]) == []
    late = said("decode", "reserved", "verified", "loaded", "first_token", "finished")
    assert "illegal_order" in rules([*ROUTER, *PREFILL, *late])


def test_a_migrated_request_is_legal_though_its_first_worker_died_unheard() -> None:
    router = [
        *said("router", "received", "routed"),
        *said("router", "migrated", "routed", "finished", attempt=2, first_seq=3),
    ]
    second = [replace(event, attempt=2, seq=event.seq + 5) for event in PREFILL]
    decode = [replace(event, attempt=2, worker_id="decode-2") for event in DECODE]
    assert check([*router, *PREFILL, *second, *decode]) == []


def test_a_request_that_left_its_worker_with_its_state_is_legal() -> None:
    assert check(MOVED) == []


def test_a_request_that_has_left_draws_nothing_more() -> None:
    late = LifecycleEntry("decode", "decode-1", 5, "req-1", 1, 9, "progress", {})
    assert "illegal_order" in rules([*MOVED, gap("decode", 7, 8), late])


@pytest.mark.parametrize("end", ["failed", "cancelled"])
def test_a_request_that_was_ended_owes_no_causes(end: str) -> None:
    assert check([*said("router", "received", "routed", end), *PREFILL]) == []


def test_a_router_that_was_killed_may_have_said_less_than_it_did() -> None:
    """Its order reached prefill, and what it had published was still on its way."""
    assert check([*said("router", "received"), *PREFILL[:2]]) == []
    assert check(PREFILL[:2]) == []
    assert rules([*said("router", "received", "routed"), *DECODE[:1]]) == ["missing_cause"]


def test_order_within_a_publisher_is_by_its_numbers() -> None:
    wrong = said("decode", "reserved", "first_token", "verified", "finished")
    found = check([*ROUTER, *PREFILL, *wrong])
    assert {violation.rule for violation in found} == {"illegal_order"}
    first = Violation("req-1", 1, "illegal_order", "decode.first_token of decode-1 after reserved")
    assert found[0] == first


def test_nothing_follows_an_end_even_across_a_gap() -> None:
    late = LifecycleEntry("decode", "decode-1", 5, "req-1", 1, 9, "progress", {})
    assert rules([*WHOLE, gap("decode", 6, 7), late]) == ["illegal_order"]


def test_a_finished_request_may_be_audited_once() -> None:
    audited = said("decode", "audited", first_seq=6)
    assert check([*WHOLE, *audited]) == []
    assert rules([*WHOLE, *audited, *said("decode", "audited", first_seq=7)]) == ["illegal_order"]
    early = said("decode", "reserved", "verified", "first_token", "audited")
    assert "illegal_order" in rules([*ROUTER, *PREFILL, *early])


def test_a_gap_excuses_what_it_covers() -> None:
    finished = LifecycleEntry("decode", "decode-1", 5, "req-1", 1, 5, "finished", {})
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
    whole = WHOLE if any((one.role, one.name) == event for one in WHOLE) else MOVED
    log = [one for one in whole if (one.role, one.name) not in needs]
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


# Recorded from a cluster whose prefill worker stood still between Commit and its answer, and came
# back: decode obeyed it, and the client got 155 of 600 tokens with status 200.
CUT: tuple[tuple[str, int, str, Mapping[str, object]], ...] = (
    ("router", 1, "received", {"tokens": 60, "tenant": "public", "deadline_ms": 300000}),
    ("router", 2, "routed", {"prefill": "prefill-1", "decode": "decode-1", "plane": "grpc"}),
    ("prefill", 1, "queued", {"position": 0}),
    ("decode", 1, "reserved", {"wanted_full": [0, 4], "wanted_recurrent": [60, 61]}),
    ("prefill", 2, "admitted", {"position": 0, "prompt_len": 60, "recurrent": "clear"}),
    ("prefill", 3, "chunk", {"index": 1, "count": 2, "start": 0, "end": 32}),
    ("prefill", 4, "chunk", {"index": 2, "count": 2, "start": 32, "end": 60}),
    ("hostcache", 1, "stored", {"units": 4, "reserved_units": 4}),
    ("decode", 2, "verified", {"units": 5}),
    ("decode", 3, "first_token", {"offset": 0}),
    ("decode", 4, "progress", {"tokens": 64}),
    ("decode", 5, "progress", {"tokens": 128}),
    ("decode", 6, "aborted", {"reason": "prefill_failed"}),
    ("prefill", 5, "failed", {"reason": "Unavailable"}),
    ("hostcache", 2, "stored", {"units": 11, "reserved_units": 11}),
    ("router", 3, "finished", {"reason": "cancelled", "prompt": 60, "tokens": 155}),
)


def recorded(*changes: tuple[str, str, dict[str, str]]) -> list[LifecycleEntry]:
    """The recorded life, with other facts for some (role, event)."""
    others: dict[tuple[str, str], Mapping[str, object]] = {
        (role, name): facts for role, name, facts in changes
    }
    return [
        LifecycleEntry(role, f"{role}-1", 5, "req-1", 1, seq, name, others.get((role, name), facts))
        for role, seq, name, facts in CUT
    ]


def test_an_answer_that_prefill_cut_is_illegal() -> None:
    assert rules(recorded()) == ["ended_by_prefill", "cut_answer"]


@pytest.mark.parametrize("reason", ["prefill_failed", "cancelled", "reservation_ended"])
def test_prefill_cannot_end_what_was_committed_whatever_the_router_makes_of_it(reason: str) -> None:
    by_prefill = ("decode", "aborted", {"reason": reason})
    finished = ("router", "finished", {"reason": "stop"})
    assert rules(recorded(by_prefill, finished)) == ["ended_by_prefill"]


def test_an_answer_is_not_complete_when_decode_was_made_to_end_it() -> None:
    by_router = ("decode", "aborted", {"reason": "client_gone"})
    assert rules(recorded(by_router)) == ["cut_answer"]
    finished = ("router", "finished", {"reason": "length"})
    assert rules(recorded(by_router, finished)) == ["cut_answer"]


def test_a_stop_string_ends_what_decode_was_at() -> None:
    by_router = ("decode", "aborted", {"reason": "stop"})
    finished = ("router", "finished", {"reason": "stop"})
    assert rules(recorded(by_router, finished)) == []


def test_a_reservation_may_be_ended_by_its_writer() -> None:
    log = [*said("router", "received", "routed", "failed"), *said("prefill", "queued", "admitted")]
    decode = said("decode", "reserved", "aborted")
    decode[-1] = replace(decode[-1], facts={"reason": "prefill_failed"})
    assert check([*log, *decode]) == []


def test_an_attempt_that_was_lost_does_not_spoil_the_next() -> None:
    router = [
        *said("router", "received", "routed"),
        *said("router", "migrated", "routed", "finished", attempt=2, first_seq=3),
    ]
    router[-1] = replace(router[-1], facts={"reason": "length"})
    first = said("decode", "reserved", "verified", "first_token", "aborted")
    first[-1] = replace(first[-1], facts={"reason": "attempt_lost"})
    second = [replace(event, attempt=2, worker_id="decode-2") for event in DECODE]
    prefill = [replace(event, attempt=2, seq=event.seq + 5) for event in PREFILL]
    assert check([*router, *first, *PREFILL, *second, *prefill]) == []
