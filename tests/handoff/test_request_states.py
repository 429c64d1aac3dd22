"""The request table: the documented path, its ways out, and what absorbs."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferryman.handoff import request as r
from ferryman.handoff.request import RequestEvent, RequestState, next_state, reached
from ferryman.handoff.transitions import IllegalTransition, terminal_states

PATH: list[RequestEvent] = [
    r.RequestQueued(),
    r.Routed(1),
    r.Reserved(),
    r.PrefillStarted(),
    r.TransferStarted(),
    r.Committed(),
    r.DecodeStarted(),
    r.RequestFinished(),
]
ALL_EVENTS: list[RequestEvent] = [
    *PATH,
    r.Migrated(),
    r.RequestCancelled(),
    r.Failed("Unavailable"),
]
TERMINAL = {RequestState.FINISHED, RequestState.CANCELLED, RequestState.FAILED}


def after(*events: RequestEvent) -> RequestState:
    state = RequestState.RECEIVED
    for event in events:
        state = next_state(state, event)
    return state


def test_the_documented_path_leads_from_the_door_to_the_last_token() -> None:
    assert after(*PATH) is RequestState.FINISHED


def test_every_state_has_a_row_and_three_are_terminal() -> None:
    assert set(r.TRANSITIONS) == set(RequestState)
    assert terminal_states(r.TRANSITIONS) == TERMINAL


@pytest.mark.parametrize("state", [s for s in RequestState if s not in TERMINAL])
def test_every_living_request_can_be_cancelled_and_can_fail(state: RequestState) -> None:
    assert next_state(state, r.RequestCancelled()) is RequestState.CANCELLED
    assert next_state(state, r.Failed("CorruptState")) is RequestState.FAILED


@pytest.mark.parametrize("steps", range(2, 6))
def test_what_has_not_committed_is_routed_again(steps: int) -> None:
    assert after(*PATH[:steps], r.Routed(2)) is RequestState.ROUTED


def test_what_has_committed_migrates_and_is_not_simply_routed_again() -> None:
    with pytest.raises(IllegalTransition, match="Routed cannot happen in state committed"):
        after(*PATH[:6], r.Routed(2))
    assert after(*PATH[:6], r.Migrated()) is RequestState.MIGRATING


def test_a_migrating_request_passes_every_stage_again_and_decodes() -> None:
    again: list[RequestEvent] = [r.RequestQueued(), r.Routed(2), *PATH[2:7]]
    assert after(*PATH[:7], r.Migrated(), *again) is RequestState.DECODING


def test_an_illegal_event_is_named_with_its_state() -> None:
    with pytest.raises(IllegalTransition) as caught:
        next_state(RequestState.QUEUED, r.Committed())
    assert (caught.value.state, caught.value.event) == (RequestState.QUEUED, r.Committed())


@given(st.sampled_from(sorted(TERMINAL)), st.lists(st.sampled_from(ALL_EVENTS)))
def test_no_late_event_resurrects_a_request(state: RequestState, late: list[RequestEvent]) -> None:
    for event in late:
        assert next_state(state, event) is state


@given(st.lists(st.sampled_from(ALL_EVENTS), max_size=40))
def test_any_order_of_events_is_followed_or_refused_and_can_still_end(
    events: list[RequestEvent],
) -> None:
    state = RequestState.RECEIVED
    for event in events:
        with suppress(IllegalTransition):
            state = next_state(state, event)
    assert next_state(state, r.Failed("gone")) in TERMINAL


def test_a_token_proves_the_stages_before_it_whoever_reports_first() -> None:
    state = reached(RequestState.ROUTED, RequestState.DECODING)
    assert state is RequestState.DECODING
    assert reached(state, RequestState.TRANSFERRING) is RequestState.DECODING


@pytest.mark.parametrize("state", sorted(TERMINAL))
def test_a_stage_seen_late_changes_nothing_in_a_terminal_state(state: RequestState) -> None:
    assert reached(state, RequestState.DECODING) is state


def test_a_migrating_request_stays_so_until_tokens_come_again() -> None:
    assert reached(RequestState.MIGRATING, RequestState.COMMITTED) is RequestState.MIGRATING
    assert reached(RequestState.MIGRATING, RequestState.DECODING) is RequestState.DECODING
