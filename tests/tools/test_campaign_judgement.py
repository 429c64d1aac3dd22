"""The verdicts of a campaign on answers and outages are right, without a cluster."""

from __future__ import annotations

import pytest
from tools.campaigns.callers import CallerJob, CallOutcome, Verdict, judge
from tools.campaigns.faults import unexcused
from tools.campaigns.outages import Absences, Interval, outages
from tools.campaigns.traces import Traces, judged

from ferryman.client import SamplingParams
from ferryman.handoff.lifecycle import LifecycleEntry

JOB = CallerJob((1, 2), SamplingParams(max_tokens=3), (5, 6, 7), "w5 w6 w7")
ROLES = {"router": ("router",), "decode": ("decode-1", "decode-2")}


@pytest.mark.parametrize(
    ("text", "reason", "verdict"),
    [
        pytest.param("w5 w6 w7", "length", Verdict.WHOLE, id="all of it"),
        pytest.param("w5 w6", "length", Verdict.CUT, id="the end is missing"),
        pytest.param("w5 w6 w7", "cancelled", Verdict.CUT, id="said to be cancelled"),
        pytest.param("w5 w6 w7", None, Verdict.CUT, id="no reason"),
        pytest.param("w5 w9 w7", "length", Verdict.WRONG, id="another token"),
        pytest.param("w5 w6 w7 w7", "length", Verdict.WRONG, id="a token twice"),
    ],
)
def test_an_answer_is_judged_by_what_it_should_be(
    text: str, reason: str | None, verdict: Verdict
) -> None:
    assert judge(JOB, text, reason)[0] is verdict


def test_an_outage_is_when_all_of_a_role_are_away() -> None:
    absences = Absences(("router", "decode-1", "decode-2", "nats"))
    absences.left("decode-1", 1.0)
    absences.left("nats", 1.5)
    absences.left("decode-2", 3.0)
    absences.came_back("decode-1", 4.0)
    absences.left("router", 10.0)
    assert outages(absences, ROLES, now=12.0, grace=0.5) == [
        Interval(10.0, 12.5),
        Interval(3.0, 4.5),
    ]


def test_who_comes_back_while_the_broker_is_away_is_heard_of_when_that_is_back() -> None:
    absences = Absences(("router", "decode-1", "decode-2", "nats"))
    for name in ("decode-1", "decode-2"):
        absences.left(name, 1.0)
    absences.came_back("decode-1", 3.0)
    absences.came_back("decode-2", 4.0)
    absences.left("router", 10.0)
    absences.came_back("router", 11.0)
    broker = [Interval(2.0, 6.0), Interval(20.0, 30.0)]
    found = outages(absences, ROLES, now=40.0, grace=0.5, broker=broker)
    assert found == [Interval(10.0, 11.5), Interval(1.0, 6.5)]


def test_each_life_of_a_call_is_judged_by_itself() -> None:
    def said(request_id: str, *names: str, **facts: object) -> list[LifecycleEntry]:
        return [
            LifecycleEntry("router", request_id, 1, request_id, 1, seq, name, facts)
            for seq, name in enumerate(names, 1)
        ]

    first = said("call", "received", "routed")
    again = said("r2", "received", "routed", "cancelled", correlation_id="call", sent_before=1)
    other = said("other", "received", "received")
    assert judged([*first, *again, *other], {"call"}) == Traces(1, 1, [])
    (found,) = judged([*first, *again, *other], {"call", "other"}).violations
    assert (found.request_id, found.rule) == ("other", "illegal_order")


def test_only_a_failure_within_an_outage_is_excused() -> None:
    def failed(start: float, end: float) -> CallOutcome:
        return CallOutcome("r", "sdk", Interval(start, end), Verdict.TYPED)

    during, before, long_after = failed(2.0, 3.5), failed(1.0, 2.0), failed(3.0, 9.0)
    outcomes = [during, before, long_after]
    assert unexcused(outcomes, [Interval(3.0, 4.0)]) == [before, long_after]
