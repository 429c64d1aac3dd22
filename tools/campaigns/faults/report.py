"""The figures of a campaign, and all that must not have been."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

from tools.campaigns.faults.callers import CallOutcome, CampaignCallers, Verdict, tally
from tools.campaigns.faults.conditions import Interval
from tools.campaigns.faults.draws import FaultKind
from tools.campaigns.faults.events import EventWatch
from tools.campaigns.faults.excuses import excuse
from tools.campaigns.faults.injector import ENDS, Injector, Strike
from tools.campaigns.faults.processes import ROLES, LauncherLog, role_of
from tools.campaigns.faults.stages import stage_at, stage_of
from tools.campaigns.faults.traces import Traces


@dataclass(frozen=True, slots=True)
class FinishedCampaign:
    """A campaign that is over: what was done, what was seen, what is held."""

    injector: Injector
    callers: CampaignCallers
    watch: EventWatch
    traces: Traces
    held: dict[str, Any]
    log: LauncherLog
    seconds: float


def report(done: FinishedCampaign) -> int:
    """Prints the figures; returns the number of events that must not happen."""
    conditions, strikes = done.injector.conditions, done.injector.strikes
    unserved_by = {name: conditions.unserved_by(name) for name in ROLES["router"]}
    unserved_by[""] = conditions.unserved()
    failed = [one for one in done.callers.outcomes if one.verdict is not Verdict.WHOLE]
    excuses = {one.request_id: excuse(one, unserved_by, _deaths(done)) for one in failed}
    bad = [one for one in failed if excuses[one.request_id] is None]
    killed = Counter(s.names[0] for s in strikes if s.kind in ENDS)
    uncaused = {n: done.log.ends[n] - killed[n] for n in done.log.ends}
    uncaused = {name: number for name, number in uncaused.items() if number > 0}
    stages, num_staged = _stages(done)
    not_over = done.injector.not_over
    num_bad = len(bad) + len(done.traces.violations) + len(uncaused) + len(done.held)
    num_bad += len(not_over)
    figures = {
        "faults": dict(sorted(Counter(_name_of(one) for one in strikes).items())),
        "num_faults": len(strikes),
        "at_a_named_stage": num_staged,
        "stages": stages,
        "without_effect": dict(done.injector.without_effect),
        "milliseconds_to_strike": _delays(strikes),
        "num_calls": len(done.callers.outcomes),
        "connections_refused": done.callers.num_refused,
        "verdicts": {str(v): n for v, n in tally(done.callers.outcomes).items()},
        "errors": dict(Counter(one.detail.split(":")[0] for one in failed)),
        "excused": dict(Counter(e for e in excuses.values() if e)),
        "seconds_without_a_replica": {
            name or "all": _total(away) for name, away in unserved_by.items()
        },
        "slowest_call_seconds": _slowest(done.callers.outcomes),
        "traces": {"checked": done.traces.num_calls, "sent_again": done.traces.num_sent_again},
        "illegal_traces": dict(Counter(one.rule for one in done.traces.violations)),
        "deaths_that_nobody_caused": uncaused,
        "did_not_happen_or_end": not_over,
        "spared": dict(done.injector.spared),
        "held_at_the_end": done.held,
        "must_not_be": num_bad,
        "seconds": round(done.seconds, 1),
    }
    print(json.dumps(figures, indent=1))
    for one in bad:
        took = f"{one.during.end - one.during.start:.1f} s, until {one.during.end:.1f}"
        where = f"{one.way} {one.request_id} at router {one.router}"
        print(f"{one.verdict}: {where} after {took}: {one.detail}")
        _print_beside(strikes, one)
    for violation in done.traces.violations:
        print(f"illegal: {violation.request_id}: {violation.rule}: {violation.detail}")
    return num_bad


def _print_beside(strikes: list[Strike], outcome: CallOutcome) -> None:
    """The faults of that time, to find the cause."""
    around = Interval(outcome.during.start - 15, outcome.during.end)
    for one in strikes:
        if around.contains(one.moment):
            stage = stage_of(one.event) if one.event else ""
            whose = "ITS " if one.event and one.event.request_id == outcome.request_id else ""
            print(f"    {one.moment:.2f} {one.kind} {' | '.join(one.names)} {whose}{stage or ''}")


def _deaths(done: FinishedCampaign) -> dict[str, list[Interval]]:
    """When a router was killed, until it was back."""
    conditions = done.injector.conditions
    killed = {s.moment for s in done.injector.strikes if s.kind is FaultKind.KILL}
    return {
        name: [one for one in conditions.of(name) if one.start in killed]
        for name in ROLES["router"]
    }


def _name_of(strike: Strike) -> str:
    return f"{strike.kind} {' | '.join(sorted(map(role_of, strike.names)))}"


def _stages(done: FinishedCampaign) -> tuple[dict[str, int], int]:
    """How many faults struck each stage, as the events say; and how many struck one."""
    stages: Counter[str] = Counter()
    for one in done.injector.strikes:
        if one.event is None:
            stages["none: struck at once"] += 1
            continue
        log = done.watch.logs[one.event.request_id, one.event.attempt]
        stages[stage_at(log, one.event.publisher, one.unix_ms) or "none: it was over"] += 1
    num_staged = sum(n for name, n in stages.items() if not name.startswith("none"))
    return dict(sorted(stages.items())), num_staged


def _delays(strikes: list[Strike]) -> dict[str, float]:
    delays = sorted(one.unix_ms - one.event.unix_ms for one in strikes if one.event)
    if not delays:
        return {}
    return {
        "median": round(delays[len(delays) // 2], 1),
        "90 of 100": round(delays[len(delays) * 9 // 10], 1),
    }


def _total(intervals: list[Interval]) -> float:
    return round(sum(one.end - one.start for one in intervals), 1)


def _slowest(outcomes: list[CallOutcome]) -> float:
    return round(max((o.during.end - o.during.start for o in outcomes), default=0.0), 1)
