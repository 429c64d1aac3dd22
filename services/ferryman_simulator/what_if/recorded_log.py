"""A lifecycle log in a file, and the cluster that wrote it in the file's first line.

    {"cluster": {"model": …, "settings": {…}, "fleet": {…}}}
    {"v": 1, "event": "received", …}        as `ferryman events --json` prints them

Without the first line the file is such a log alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ferryman.errors import ConfigError
from ferryman.handoff.lifecycle import LifecycleEntry
from ferryman.runtime.lifecycle import decode_event, encode_event
from ferryman_simulator.run import trace_lines
from ferryman_simulator.trace import BadTrace
from ferryman_simulator.what_if.served_settings import ServedFleet


@dataclass(frozen=True, slots=True)
class RecordedCluster:
    """The model's folder or id, and the variables of the processes: sizes and policies."""

    model: str
    settings: Mapping[str, str]
    fleet: ServedFleet


@dataclass(frozen=True, slots=True)
class RecordedLog:
    """The events in a file; `clusters` has the one that wrote them, or none if it does not say."""

    events: Sequence[LifecycleEntry]
    clusters: tuple[RecordedCluster, ...] = ()


def read_recorded(path: Path) -> RecordedLog:
    """Raises BadTrace, with the file's line, for one that is neither."""
    clusters: list[RecordedCluster] = []
    events: list[LifecycleEntry] = []
    try:
        with path.open("rb") as opened:
            for number, line in trace_lines(path, opened):
                if number == 1 and line.startswith('{"cluster":'):
                    clusters.append(_cluster(path, line))
                else:
                    events.append(_event(path, number, line))
    except OSError as error:
        raise BadTrace(path, 0, error.strerror or str(error)) from None
    return RecordedLog(events, tuple(clusters))


def write_recorded(path: Path, cluster: RecordedCluster, events: Iterable[LifecycleEntry]) -> None:
    """Raises ConfigError where nothing can be written."""
    try:
        with path.open("w") as opened:
            opened.writelines(f"{line}\n" for line in _lines(cluster, events))
    except OSError as error:
        raise ConfigError(f"--save {path}: {error.strerror or error}") from None


def _lines(cluster: RecordedCluster, events: Iterable[LifecycleEntry]) -> Iterator[str]:
    yield json.dumps({"cluster": asdict(cluster)})
    yield from (encode_event(event).decode() for event in events)


def _event(path: Path, number: int, line: str) -> LifecycleEntry:
    try:
        return decode_event(line.encode())
    except ValueError as error:
        raise BadTrace(path, number, str(error)) from None


def _cluster(path: Path, line: str) -> RecordedCluster:
    try:
        raw: dict[str, Any] = json.loads(line)["cluster"]
        fleet = raw["fleet"]
        counts = {name: int(fleet[name]) for name in ("num_prefill", "num_decode", "num_nodes")}
        slots = {
            str(role): {str(kind): int(count) for kind, count in pools.items()}
            for role, pools in fleet["slots"].items()
        }
        settings = {str(name): str(value) for name, value in raw["settings"].items()}
        return RecordedCluster(str(raw["model"]), settings, ServedFleet(**counts, slots=slots))
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise BadTrace(path, 1, f"no cluster of a recorded log: {error!r}") from None
