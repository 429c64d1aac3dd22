"""The strip of a prompt, read from plans as workers report them, and the ranges of its hand-off."""

from __future__ import annotations

from typing import Any

import pytest
from tests.worker.test_reuse import HYBRID, MIXED, PAGE, plan_of

from ferryman.cache.resume import Reason, ResumePlan, Uncached
from ferryman.handoff.lifecycle import LifecycleEntry
from ferryman.runtime.lifecycle import decode_event, encode_event
from ferryman.worker.summary import plan_facts
from ferryman_router.doors.web.prompt_strip import StripSpan, handoff_pages, prompt_strip


def entry(role: str, name: str, attempt: int = 1, seq: int = 1, **facts: Any) -> LifecycleEntry:
    """An event as it comes out of the log."""
    made = LifecycleEntry(role, f"{role}-1", 7, "r", attempt, seq, name, facts)
    return decode_event(encode_event(made))


def admitted(plan: ResumePlan, attempt: int = 1, seq: int = 1) -> LifecycleEntry:
    return entry("prefill", "admitted", attempt, seq, **plan_facts(HYBRID, plan))


RECEIVED = entry("router", "received", page_size=PAGE, tokens=30)


def test_each_range_of_a_prompt_has_its_source() -> None:
    strip = prompt_strip([RECEIVED, admitted(MIXED)], page_size=1)
    assert strip is not None
    assert (strip.tokens, strip.position, strip.page_size, strip.recurrent) == (30, 20, 4, "load")
    assert strip.spans == (
        StripSpan(0, 4, "device"),
        StripSpan(4, 8, "host"),
        StripSpan(8, 12, "storage"),
        StripSpan(12, 20, "peer"),
        StripSpan(20, 30, "computed", "never_seen"),
    )


def test_reasons_come_in_the_order_of_the_prompt_and_the_last_page_may_be_short() -> None:
    plan = plan_of(8, 2)._replace(
        uncached=(
            Uncached(Reason.NO_SNAPSHOT, 2, 4),
            Uncached(Reason.PAGE_ALIGNMENT, 4, 5),
            Uncached(Reason.NEVER_SEEN, 5, 8),
        ),
        snapshots=(16, 28),
    )
    strip = prompt_strip([RECEIVED, admitted(plan)], page_size=1)
    assert strip is not None
    assert strip.spans == (
        StripSpan(0, 8, "device"),
        StripSpan(8, 16, "computed", "no_snapshot"),
        StripSpan(16, 20, "computed", "page_alignment"),
        StripSpan(20, 30, "computed", "never_seen"),
    )
    assert strip.snapshots == (16, 28)


def test_the_latest_plan_of_the_latest_attempt_counts() -> None:
    cold = plan_of(0, 0)
    events = [RECEIVED, admitted(cold), admitted(MIXED, attempt=2), admitted(cold, 2, seq=2)]
    strip = prompt_strip(events, page_size=1)
    assert strip is not None
    assert (strip.attempt, strip.position) == (2, 0)


def test_without_a_plan_there_is_no_strip() -> None:
    assert prompt_strip([RECEIVED], page_size=4) is None
    assert handoff_pages([RECEIVED]) is None


def test_a_log_without_the_page_size_is_read_with_the_fleet_s() -> None:
    strip = prompt_strip([admitted(plan_of(8, 2))], page_size=PAGE)
    assert strip is not None
    assert strip.spans == (StripSpan(0, 8, "device"), StripSpan(8, 30, "computed", "never_seen"))


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"prompt_len": "many", "cached": 3, "uncached": [1], "snapshots": "none"},
        {"prompt_len": -4, "cached": {"device": -8}, "uncached": {"never_seen": "x"}},
        {"prompt_len": 12, "cached": {"device": 1 << 70}, "uncached": {"never_seen": 9}},
        {"prompt_len": 12, "num_uncached": 4, "load_seconds": float("inf"), "position": True},
    ],
)
def test_facts_of_another_version_make_a_strip_that_fits_its_prompt(facts: dict[str, Any]) -> None:
    strip = prompt_strip([RECEIVED, entry("prefill", "admitted", **facts)], page_size=4)
    assert strip is not None
    ends = [0, *(span.end for span in strip.spans)]
    assert [span.start for span in strip.spans] == ends[:-1]
    assert ends[-1] == strip.tokens


def test_a_hand_off_has_its_ranges_by_kind_and_its_bytes() -> None:
    reserved: dict[str, Any] = {
        "wanted_full": [1, 2],
        "wanted_recurrent": [30, 31],
        "path": "memory",
    }
    events = [
        entry("decode", "reserved", **reserved, held={"device": 16}, why="one machine"),
        entry("decode", "verified", seq=2, units=2),
        entry("prefill", "handed_off", seq=5, bytes=126208, seconds=0.001, path="memory"),
    ]
    handoff = handoff_pages(events)
    assert handoff is not None
    assert handoff.wanted == {"full": (1, 2), "recurrent": (30, 31)}
    assert (handoff.held, handoff.path, handoff.why) == ({"device": 16}, "memory", "one machine")
    assert (handoff.units, handoff.num_bytes, handoff.seconds) == (2, 126208, 0.001)
    (open_one,) = [handoff_pages(events[:1])]
    assert open_one is not None
    assert (open_one.num_bytes, open_one.units) == (0, 0)
