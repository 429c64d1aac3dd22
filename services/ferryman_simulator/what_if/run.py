"""One what-if: the log's requests through the cluster as it is, then with other settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ferryman.errors import ConfigError, InvalidRequest
from ferryman.settings.names import Key
from ferryman.settings.sources import Sources
from ferryman_simulator.modelled_time import GUESSES, CostModel
from ferryman_simulator.simulation import simulate
from ferryman_simulator.trace import Trace, TracedRequest
from ferryman_simulator.what_if.figures import Calibration, Figures, JudgedLog
from ferryman_simulator.what_if.observed import ObservedLog
from ferryman_simulator.what_if.report import WhatIfReport
from ferryman_simulator.what_if.scenario import pools_differ, scenario_setup
from ferryman_simulator.what_if.search import Changes, Search, SearchResult
from ferryman_simulator.what_if.served_settings import (
    ServedFleet,
    read_served,
    with_changes,
)
from ferryman_simulator.what_if.tunable import ladders, parse_change

PACE_CHANGES = {
    "dtype": "another dtype gives other bits, and computes at another pace than the log's",
    "kv_dtype": "fp8 keeps keys and values with less precision: answers are others",
    "chunk_tokens": "steps are taken to cost the same for each token, whatever their length",
    "max_running": "a decode step is taken to last as long, whatever runs in it",
}


@dataclass(frozen=True, slots=True)
class ServedLog:
    """A log, and the cluster that served it: its requests, what was measured, its settings and its
    workers. `num_older` requests were served by processes before those of now."""

    trace: Trace
    observed: ObservedLog
    sources: Sources
    fleet: ServedFleet
    num_older: int = 0


class WhatIf:
    """The runs over one log. Raises InvalidRequest for a log without a request that ended well."""

    def __init__(self, log: ServedLog) -> None:
        self._log, self._served = log, read_served(log.sources)
        if not log.trace.requests:
            raise InvalidRequest("no request of the log ended well: there is nothing to simulate")
        self._costs = _costs(log)
        self._judged = JudgedLog.of(log.trace.requests, log.observed.outcomes)
        self._extra = 0.0

    def calibrated(self) -> Calibration:
        """The cluster as it is."""
        setup = scenario_setup(self._served, self._log.fleet, self._costs)
        result = simulate(setup, self._log.trace)
        self._extra = self._judged.extra_seconds(result.outcomes)
        causes = [*_causes(self._log), pools_differ(setup, self._log.fleet)]
        if result.num_refused:
            causes.append(f"{result.num_refused} requests are longer than the simulated pools")
        return Calibration(
            self._judged.measured_figures(),
            self._judged.figures(result.outcomes, self._extra),
            len(self._judged.judged),
            self._extra,
            tuple(filter(None, causes)),
        )

    def figures(self, changes: Changes) -> Figures:
        """The cluster with these changes. Raises ConfigError if it could not be started."""
        served = read_served(with_changes(self._log.sources, _assignments(changes)))
        setup = scenario_setup(served, self._log.fleet, self._costs)
        result = simulate(setup, self._log.trace)
        if result.num_refused:
            raise ConfigError(f"{result.num_refused} requests would not fit into the pools")
        return self._judged.figures(result.outcomes, self._extra)

    def report(self, asked: Sequence[str], has_time: Callable[[], bool]) -> WhatIfReport:
        """All of it: what `asked` names (`SETTING=VALUE`) together, or else what gains most."""
        changes = tuple(parse_change(text, self._served) for text in asked)
        calibration = self.calibrated()
        search = Search(calibration.simulated, self.figures, has_time)
        if changes:
            search.try_together(changes)
            outcome = search.result()
        else:
            outcome = search.run(ladders(self._served))
        trace = self._log.trace
        return WhatIfReport(
            num_requests=len(trace.requests),
            num_left_out=trace.num_left_out + self._log.num_older,
            prompt_tokens=trace.num_tokens,
            span_seconds=trace.requests[-1].arrival_seconds,
            num_nodes=self._log.fleet.num_nodes,
            calibration=calibration,
            search=outcome,
            warnings=tuple(_warnings(outcome)),
        )


def _assignments(changes: Changes) -> Mapping[Key, str]:
    return {key: text for change in changes for key, text in change.assignments().items()}


def _warnings(outcome: SearchResult) -> Iterator[str]:
    names = {change.key[1] for trial in outcome.gains for change in trial.changes}
    yield from (text for name, text in PACE_CHANGES.items() if name in names)


def _costs(log: ServedLog) -> CostModel:
    """The costs that the log tells, of all workers of a role together."""
    costs = log.observed.costs(GUESSES.told_by(log.trace.pace))
    pace = costs.prefill_seconds_per_token / log.fleet.num_prefill
    return replace(costs, prefill_seconds_per_token=pace)


def _causes(log: ServedLog) -> Iterator[str]:
    """Facts of the log that a simulation lacks."""
    counts = log.fleet
    if max(counts.num_prefill, counts.num_decode, counts.num_nodes) > 1:
        yield (
            f"{counts.num_prefill} prefill workers, {counts.num_decode} decode workers and "
            f"{counts.num_nodes} nodes are simulated as one of each, with all their memory"
        )
    if log.observed.num_drafted:
        yield "drafts were verified: a simulation draws one token a step"
    if older := _reused_from_before(log):
        yield f"{older:,} tokens were reused from before the log begins"
    if log.trace.num_left_out:
        yield f"{log.trace.num_left_out} requests that did not end well took room and time"


def _reused_from_before(log: ServedLog) -> int:
    """Tokens that were cached though no earlier request of the log has them; what the prints of a
    long prompt are too coarse to tell does not count."""
    outcomes = log.observed.outcomes
    more = [
        outcomes[request.request_id].cached.total - _shared_len(request) - request.prompt_len // 32
        for request in log.trace.requests
        if request.request_id in outcomes
    ]
    return sum(count for count in more if count > 0)


def _shared_len(request: TracedRequest) -> int:
    """The tokens that an earlier request has: all but the last part, which is a request's own."""
    return request.content.num_tokens - request.content.lengths[-1]
