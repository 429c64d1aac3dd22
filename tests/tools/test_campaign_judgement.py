"""The verdicts of the campaign of faults on answers, failures and stages, without a cluster."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from tools.campaigns.faults.callers import CallerJob, CallOutcome, Verdict, judge
from tools.campaigns.faults.conditions import Conditions, Interval
from tools.campaigns.faults.draws import FaultKind, draw, partners
from tools.campaigns.faults.endurance import Endurance
from tools.campaigns.faults.excuses import ITS_ROUTER_DIED, NO_REPLICA, excuse
from tools.campaigns.faults.ledgers import held_by_cache, held_by_router, held_in
from tools.campaigns.faults.processes import NAMES, LauncherLog, parsed_socket
from tools.campaigns.faults.stages import STAGES, stage_at
from tools.campaigns.faults.traces import Traces, judged, united

from ferryman.client import SamplingParams
from ferryman.handoff.lifecycle import FOLLOWS, LifecycleEntry

JOB = CallerJob((1, 2), SamplingParams(max_tokens=3), (5, 6, 7), "w5 w6 w7")
ROLES = {"router": ("router-1", "router-2"), "prefill": ("p1", "p2"), "decode": ("d1", "d2")}


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


def conditions(*spans: tuple[Sequence[str], float, float]) -> Conditions:
    """Processes that were away or cut, from when until when."""
    made = Conditions(ROLES)
    for names, start, end in spans:
        made.begin(names, start).ended = end
    return made


def seconds(intervals: Sequence[Interval]) -> float:
    return sum(one.end - one.start for one in intervals)


def test_a_role_is_unserved_while_all_of_it_are_away_and_three_seconds_longer() -> None:
    away = conditions((("d1",), 1.0, 5.0), (("d2",), 3.0, 9.0))
    assert away.unserved() == [Interval(3.0, 8.0)]
    assert conditions((("d1",), 1.0, 5.0), (("d2",), 9.0, 12.0)).unserved() == []


def test_a_cut_between_the_last_two_leaves_no_way() -> None:
    cut = conditions((("p1",), 0.0, 50.0), (("d1",), 0.0, 50.0), (("p2", "d2"), 10.0, 12.0))
    assert cut.unserved() == [Interval(10.0, 15.0)]
    assert conditions((("p1", "d1"), 0.0, 50.0), (("p2", "d2"), 0.0, 50.0)).unserved() == []


def test_a_router_that_is_cut_off_from_a_role_is_unserved_by_itself() -> None:
    cut = conditions((("router-1", "d1"), 0.0, 10.0), (("router-1", "d2"), 0.0, 10.0))
    assert cut.unserved() == []
    assert seconds(cut.unserved_by("router-1")) == 13.0
    assert cut.unserved_by("router-2") == []


def test_who_comes_back_while_the_broker_is_away_is_heard_of_when_that_is_back() -> None:
    away = conditions((("d1",), 1.0, 3.0), (("d2",), 1.0, 4.0), (("nats",), 2.0, 6.0))
    assert seconds(away.unserved()) == 8.0


def test_a_worker_that_the_broker_does_not_hear_is_silent_after_six_seconds() -> None:
    short = conditions((("d1", "nats"), 0.0, 5.0), (("d2",), 0.0, 20.0))
    assert short.unserved() == []
    long = conditions((("d1", "nats"), 0.0, 10.0), (("d2",), 0.0, 20.0))
    assert long.unserved() == [Interval(6.0, 13.0)]


@pytest.mark.parametrize("names", [("d2",), ("router-1", "d2"), ("p1", "d2"), ("d2", "nats")])
def test_a_fault_that_takes_the_last_replica_is_not_chosen(names: tuple[str, ...]) -> None:
    away = Conditions(ROLES)
    away.begin(("d1",), 1.0)
    if names == ("p1", "d2"):
        away.begin(("p2",), 1.0)
    assert not away.would_serve(names, 2.0)
    assert away.would_serve(("p1",), 2.0) is (names != ("p1", "d2"))


def failed(verdict: Verdict, end: float, router: int = 1) -> CallOutcome:
    return CallOutcome("r", "stream", router, Interval(0.0, end), verdict)


def test_only_a_failure_while_no_replica_was_left_is_excused() -> None:
    unserved_by = {"router-1": [Interval(3.0, 4.0)], "": []}
    assert excuse(failed(Verdict.TYPED, 3.5), unserved_by, {}) == NO_REPLICA
    assert excuse(failed(Verdict.TYPED, 9.0), unserved_by, {}) is None
    assert excuse(failed(Verdict.TYPED, 3.5, router=0), unserved_by, {}) is None
    assert excuse(failed(Verdict.CUT, 3.5), unserved_by, {}) is None


def test_a_connection_may_break_when_its_own_router_was_killed() -> None:
    deaths = {"router-1": [Interval(3.0, 5.0)]}
    assert excuse(failed(Verdict.CONNECTION, 3.1), {}, deaths) == ITS_ROUTER_DIED
    assert excuse(failed(Verdict.CONNECTION, 2.9), {}, deaths) is None
    assert excuse(failed(Verdict.CONNECTION, 2.9), {"router-1": [Interval(2, 3)]}, {}) is None
    assert excuse(failed(Verdict.CONNECTION, 3.1, router=2), {}, deaths) is None
    assert excuse(failed(Verdict.TYPED, 3.1), {}, deaths) is None


def event(name: str, seq: int, unix_ms: int, role: str = "decode") -> LifecycleEntry:
    return LifecycleEntry(role, "w", 1, "r", 1, seq, name, {}, unix_ms)


@pytest.mark.parametrize(
    ("moment", "stage"),
    [(99, None), (100, "reserved"), (150, "reserved"), (200, "committed"), (300, None)],
)
def test_a_stage_lasts_until_the_next_event_of_its_process(moment: int, stage: str | None) -> None:
    log = [event("finished", 3, 300), event("reserved", 1, 100), event("verified", 2, 200)]
    other = LifecycleEntry("prefill", "p", 1, "r", 1, 1, "chunk", {}, 120)
    assert stage_at([*log, other], log[0].publisher, moment) == stage


def test_a_host_cache_is_at_a_stage_for_a_moment() -> None:
    log = [event("stored", 1, 100, "hostcache")]
    assert stage_at(log, log[0].publisher, 140) == "stored in the host"
    assert stage_at(log, log[0].publisher, 160) is None


def test_each_stage_is_begun_by_an_event_after_which_something_follows() -> None:
    assert all(FOLLOWS[role][name] for role, name in STAGES)


def test_four_faults_of_five_wait_for_a_stage() -> None:
    rng = random.Random(3)
    drawn = [draw(rng) for _ in range(2000)]
    assert 0.8 < sum(bool(one.stages) for one in drawn) / len(drawn) < 0.9
    assert {one.kind for one in drawn} == set(FaultKind)
    assert {stage for one in drawn for stage in one.stages} <= set(STAGES.values())
    assert all(0.3 <= one.seconds <= 20 for one in drawn)
    assert all(set(partners(name)) <= set(NAMES) - {name} for name in NAMES)


def test_the_launcher_s_deaths_and_returns_are_each_read_once(tmp_path: Path) -> None:
    path = tmp_path / "up.log"
    path.write_text(
        "ferryman: decode-1 was ended by signal 9; starting it again in 0.1 s\n"
        "    decode-1: ferryman: no, decode-1 is not back\n"
        "ferryman: WARNING: decode-1 was ended by signal 9, death 5 in a row (see x)\n"
        "ferryman: decode-1 is back after 1.5 s\nferryman: router-1 is ba"
    )
    log = LauncherLog(path)
    log.read()
    with path.open("a") as file:
        file.write(
            "ck after 2 s\nferryman: nats exited with status 1; starting it again in 0.1 s\n"
        )
    log.read()
    assert log.returns == Counter({"decode-1": 1, "router-1": 1})
    assert log.ends == Counter({"decode-1": 2, "nats": 1})


def test_a_socket_is_read_from_the_kernel_s_table() -> None:
    line = (
        "   1: 0100007F:1F90 0100007F:C350 0A 00000000:00000000 00:00000000 00000000     0"
        "        0 4711 1 0000000000000000 100 0 0 10 0"
    )
    assert (parsed_socket(line).local, parsed_socket(line).remote) == (8080, 50000)
    assert parsed_socket(line).is_listening
    assert parsed_socket(line).inode == 4711


def test_only_cached_prefixes_may_stay_at_the_end() -> None:
    def pool(role: str, *, balances: bool = True) -> dict[str, object]:
        return {"by_role": {role: 3}, "leased": 3, "balances": balances}

    assert held_in({"full": pool("tree")}) == {}
    assert set(held_in({"full": pool("running"), "recurrent": pool("tree")})) == {"full"}
    assert held_in({"full": pool("tree", balances=False)})
    quiet = {"reserved": 0, "leased": 0, "leaving": 0}
    assert held_by_cache({"balances": True, "pools": {"full": quiet}}) == {}
    assert held_by_cache({"balances": False, "pools": {"full": quiet}})
    for name in quiet:
        assert held_by_cache({"balances": True, "pools": {"full": {**quiet, name: 1}}})
    metrics = "ferryman_router_queue_requests 0.0\nferryman_router_in_flight_requests 2.0\n"
    assert held_by_router(metrics) == {"in_flight_requests": 2.0}


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
    (violation,) = judged([*first, *again, *other], {"call", "other"}).violations
    assert (violation.request_id, violation.rule) == ("other", "illegal_order")


def test_an_event_that_the_log_has_lost_counts_as_it_was_heard() -> None:
    first, second = event("reserved", 1, 100), event("verified", 2, 200)
    assert united([second], [first, first, second]) == [second, first]
    assert united([first, first], [first]) == [first, first]


def routed(request_id: str = "r", prefill: str = "P") -> LifecycleEntry:
    facts = {"prefill": prefill, "decode": "D"}
    return LifecycleEntry("router", "R", 1, request_id, 1, 1, "routed", facts, 100)


def test_a_request_is_spared_until_it_has_had_tokens_and_after_two_strikes() -> None:
    endurance = Endurance({"R": "router-1", "P": "prefill-1", "D": "decode-2"})
    endurance.saw(routed())
    endurance.struck("decode-1")
    assert endurance.may_strike("decode-2", 500)
    endurance.struck("decode-2")
    assert not endurance.may_strike("prefill-1", 500)
    assert endurance.may_strike("prefill-2", 500)
    assert endurance.may_strike("prefill-1", 5000), "it is silent, so it has ended"
    endurance.saw(event("progress", 2, 300))
    assert endurance.may_strike("prefill-1", 500)
    endurance.struck("prefill-1")
    endurance.saw(event("progress", 3, 400))
    assert not endurance.may_strike("prefill-1", 500)
    endurance.saw(event("finished", 9, 500, "router"))
    assert endurance.may_strike("prefill-1", 500)


def test_a_request_that_is_sent_to_a_struck_worker_bears_that_strike() -> None:
    names = {"R": "router-1", "D": "decode-2"}
    endurance = Endurance(names)
    endurance.struck("prefill-1")
    endurance.saw(routed())
    assert endurance.may_strike("decode-2", 500), "its prefill worker is not known yet"
    names["P"] = "prefill-1"
    endurance.saw(routed())
    assert not endurance.may_strike("decode-2", 500)
    endurance.back("prefill-1")
    endurance.saw(routed("r2"))
    assert not endurance.may_strike("decode-2", 500)
    endurance.saw(event("first_token", 2, 300))
    assert not endurance.may_strike("decode-2", 500), "its router may not have heard of it"
    endurance.saw(event("progress", 3, 350))
    assert endurance.may_strike("decode-2", 500)
