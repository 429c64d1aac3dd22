"""The measurements in a lifecycle log: what was reused, when first tokens came, and who served."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from ferryman.handoff.lifecycle import DECODE, HOSTCACHE, PREFILL, ROUTER, LifecycleEntry
from ferryman.handoff.usage import CachedTokens
from ferryman_simulator.modelled_time import CostModel
from ferryman_simulator.result import RequestOutcome

TIERS = ("device", "host", "storage", "peer")


@dataclass(frozen=True, slots=True)
class ObservedLog:
    """The measured outcomes by request, the workers of each role, drafts that were verified, and
    seconds: of a call between processes, and per byte; 0.0 without a measurement."""

    outcomes: Mapping[str, RequestOutcome]
    workers: Mapping[str, frozenset[str]]
    num_drafted: int = 0
    load_seconds_per_byte: float = 0.0
    storage_seconds_per_byte: float = 0.0
    call_seconds: float = 0.0

    def count(self, role: str) -> int:
        return len(self.workers.get(role, ()))

    def costs(self, costs: CostModel) -> CostModel:
        """The costs with what was measured in place of the guesses."""
        measured = {
            "load_seconds_per_byte": self.load_seconds_per_byte,
            "storage_seconds_per_byte": self.storage_seconds_per_byte,
            "call_seconds": self.call_seconds,
        }
        return costs.with_values({name: value for name, value in measured.items() if value})


class _Measurements:
    """Numbers that are taken down while a log is read. Times of an attempt are its worker's own."""

    def __init__(self) -> None:
        self.outcomes: dict[str, RequestOutcome] = {}
        self.workers: dict[str, set[str]] = {}
        self.loads: list[float] = []
        self.reads: list[float] = []
        self.calls: list[float] = []
        self.num_drafted = 0
        self._prefetching: dict[str, float] = {}
        self._computed: dict[str, float] = {}

    def take(self, event: LifecycleEntry) -> None:
        if event.role in (PREFILL, DECODE, HOSTCACHE):
            self.workers.setdefault(event.role, set()).add(event.worker_id)
        if event.role == PREFILL:
            self._take_prefill(event)
        elif (event.role, event.name) == (ROUTER, "finished"):
            self.outcomes[event.request_id] = _outcome(event.facts)
            self.num_drafted += int(_number(event.facts, "drafted"))

    def _take_prefill(self, event: LifecycleEntry) -> None:
        name, now_ms = event.request_id, event.elapsed_ms
        match event.name:
            case "admitted":
                self.loads.append(_ratio(event.facts, "load_seconds", "load_bytes"))
            case "prefetching":
                self._prefetching[name] = now_ms
            case "prefetched" if name in self._prefetching:
                num_bytes = _number(_table(event.facts, "bytes"), "storage")
                seconds = (now_ms - self._prefetching[name]) / 1000
                self.reads.append(seconds / num_bytes if num_bytes else 0.0)
            case "chunk":
                self._computed[name] = now_ms
            case "handed_off" if name in self._computed:
                # The last state is sent, and decode says that it has all.
                self.calls.append((now_ms - self._computed[name]) / 1000)


def observed_log(events: Iterable[LifecycleEntry]) -> ObservedLog:
    """The measurements in events of any order of requests. A value that is none is passed over."""
    seen = _Measurements()
    for event in events:
        seen.take(event)
    return ObservedLog(
        seen.outcomes,
        {role: frozenset(ids) for role, ids in seen.workers.items()},
        seen.num_drafted,
        load_seconds_per_byte=_median(seen.loads),
        storage_seconds_per_byte=_median(seen.reads),
        call_seconds=_median(seen.calls),
    )


def _outcome(facts: Mapping[str, object]) -> RequestOutcome:
    tiers = _table(facts, "cached")
    cached = CachedTokens(*(int(_number(tiers, tier)) for tier in TIERS))
    return RequestOutcome(cached, _number(facts, "ttft_ms") / 1000)


def _table(facts: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = facts.get(name)
    return value if isinstance(value, dict) else {}


def _number(facts: Mapping[str, object], name: str) -> float:
    value = facts.get(name)
    return float(value) if isinstance(value, int | float) and value > 0 else 0.0


def _ratio(facts: Mapping[str, object], above: str, below: str) -> float:
    divisor = _number(facts, below)
    return _number(facts, above) / divisor if divisor else 0.0


def _median(values: Iterable[float]) -> float:
    positive = [value for value in values if value > 0]
    return median(positive) if positive else 0.0
