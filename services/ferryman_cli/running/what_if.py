"""`ferryman what-if`: reads the log and the settings, simulates, and prints the report."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ferryman.errors import ConfigError, InvalidRequest
from ferryman.handoff.lifecycle import LifecycleEntry
from ferryman.runtime.life import EXIT_FAILED
from ferryman.runtime.lifecycle import encode_event
from ferryman.settings.names import variable
from ferryman.settings.sources import Source, Sources, environment_source
from ferryman.wire.nats.heartbeat import DECODE, HOSTCACHE, PREFILL, Heartbeat
from ferryman_cli.endpoints import BrokerPlace
from ferryman_cli.lifecycle_reader import read_log_and_beats
from ferryman_launcher.checks.model_places import described
from ferryman_launcher.state_folder import RunningCluster
from ferryman_simulator.lifecycle import read_lifecycle
from ferryman_simulator.what_if.observed import observed_log
from ferryman_simulator.what_if.recorded_log import (
    RecordedCluster,
    read_recorded,
    write_recorded,
)
from ferryman_simulator.what_if.report import WhatIfReport, as_object, report_lines
from ferryman_simulator.what_if.run import ServedLog, WhatIf
from ferryman_simulator.what_if.selection import LogRange, selected
from ferryman_simulator.what_if.served_settings import (
    ServedFleet,
    page_size_of,
    recorded_source,
)

LOG_NAME = Path("the lifecycle log")


@dataclass(frozen=True, slots=True)
class WhatIfOptions:
    """The changes to try (none: those that the search knows), the limits of the log and of the
    time, a file to write the log to, and a model for a cluster that does not name its own."""

    asked: tuple[str, ...]
    limits: LogRange
    seconds: float
    model: str = ""
    config: str = ""
    save: str = ""


def run_on_file(path: Path, options: WhatIfOptions, *, as_json: bool) -> int:
    """The log in a file, of the cluster that the file names, or of settings given here."""
    recorded = read_recorded(path)
    chosen = selected(recorded.events, options.limits)
    fleet = ServedFleet.of_log(observed_log(chosen.events))
    cluster = recorded.clusters[0] if recorded.clusters else RecordedCluster("", {}, fleet)
    return _run(path, chosen.events, cluster, options, chosen.num_older, as_json=as_json)


def run_on_cluster(
    place: BrokerPlace,
    running: RunningCluster | None,
    options: WhatIfOptions,
    *,
    as_json: bool,
) -> int:
    """The log of a running cluster. One that `ferryman up` did not start has settings given
    here."""
    events, beats = asyncio.run(read_log_and_beats(place))
    workers = [beat.worker_id for beat in beats if beat.role in (PREFILL, DECODE)]
    chosen = selected(events, options.limits, workers)
    fleet = _heard_fleet(beats) if workers else ServedFleet.of_log(observed_log(chosen.events))
    model, settings = ("", {}) if running is None else (running.model_folder, running.settings)
    cluster = RecordedCluster(model, settings, fleet)
    return _run(LOG_NAME, chosen.events, cluster, options, chosen.num_older, as_json=as_json)


def _run(
    path: Path,
    events: Sequence[LifecycleEntry],
    cluster: RecordedCluster,
    options: WhatIfOptions,
    num_older: int,
    *,
    as_json: bool,
) -> int:
    """Prints the report; the status is 1 if it is not to be trusted."""
    if not events:
        raise InvalidRequest(
            "the log has no request of these workers: there is nothing to simulate"
        )
    if options.save:
        write_recorded(Path(options.save), cluster, events)
    sources = _sources(cluster, options)
    lines = ((number, encode_event(event).decode()) for number, event in enumerate(events, 1))
    trace = read_lifecycle(path, lines, page_size_of(sources))
    log = ServedLog(trace, observed_log(events), sources, cluster.fleet, num_older)
    report = WhatIf(log).report(options.asked, _clock(options.seconds))
    _print(report, as_json=as_json)
    return 0 if report.calibration.is_trusted else EXIT_FAILED


def _print(report: WhatIfReport, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(as_object(report)))
        return
    for line in report_lines(report):
        print(line.rstrip())


def _clock(seconds: float) -> Callable[[], bool]:
    """Says whether there is time for one more run."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() < end


def _sources(cluster: RecordedCluster, options: WhatIfOptions) -> Sources:
    """The values of the cluster's processes; below them the environment and the file here."""
    model = options.model or cluster.model
    values = {**recorded_source(cluster.settings)}
    if model:
        values[variable("model")] = str(described(model))
    elif variable("model") not in os.environ and not options.config:
        raise ConfigError("the log does not name its model: say it with --model DIR")
    recorded: Source = environment_source(values)
    return Sources.of(os.environ, recorded, config=options.config)


def _heard_fleet(beats: Sequence[Heartbeat]) -> ServedFleet:
    def count(role: str) -> int:
        return max(1, sum(beat.role == role for beat in beats))

    slots: Mapping[str, Mapping[str, int]] = {
        beat.role: {str(kind): number for kind, number in beat.pool_slots.items()}
        for beat in beats
        if beat.role in (PREFILL, DECODE)
    }
    return ServedFleet(count(PREFILL), count(DECODE), count(HOSTCACHE), slots)
