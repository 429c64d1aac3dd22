"""The lifecycle of a request as events that any process may publish, and the law of their order.

Publishers are concurrent, so order is compared in two ways only. Within one publisher, by its own
sequence number: the tables FOLLOWS. Across publishers, by what cannot exist without what: NEEDS;
whether a chunk was published before or after the first token says nothing.

A publisher that had to drop events says so with `gap {from, to}`; across a gap anything may have
happened, except that what has ended goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

ROUTER, PREFILL, DECODE, HOSTCACHE = "router", "prefill", "decode", "hostcache"
GAP = "gap"
START = ""

_ROUTER_ENDS = ("failed", "cancelled")
_HOSTCACHE_ANY = ("loaded", "stored", "corrupt", "evicted_under_lease_refused", "storage_failed")
_DECODE_GOES_ON = ("progress", "retracted", "finished", "aborted")

# An empty tuple is an end. The router's row order runs over all attempts of a request; the others'
# over one attempt. A prefill that was retracted, or that met a corrupt load, is admitted again.
# fmt: off
FOLLOWS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    ROUTER: {
        START:         ("received",),
        "received":    ("routed", "rejected", *_ROUTER_ENDS),
        "routed":      ("routed", "migrated", "finished", "rejected", *_ROUTER_ENDS),
        "migrated":    ("routed", *_ROUTER_ENDS),
        "rejected":    (),
        "finished":    (),
        "failed":      (),
        "cancelled":   (),
    },
    PREFILL: {
        START:         ("queued",),
        "queued":      ("prefetching", "admitted", "failed", "cancelled"),
        "prefetching": ("prefetched", "failed", "cancelled"),
        "prefetched":  ("admitted", "failed", "cancelled"),
        "admitted":    ("chunk", "admitted", "failed", "cancelled"),
        "chunk":       ("chunk", "admitted", "handed_off", "failed", "cancelled"),
        "handed_off":  (),
        "failed":      (),
        "cancelled":   (),
    },
    DECODE: {
        START:         ("reserved",),
        "reserved":    ("verified", "aborted"),
        "verified":    ("first_token", "retracted", "aborted"),
        "first_token": _DECODE_GOES_ON,
        "progress":    _DECODE_GOES_ON,
        "retracted":   ("resumed", "aborted"),
        "resumed":     ("first_token", *_DECODE_GOES_ON),
        "finished":    (),
        "aborted":     (),
    },
    HOSTCACHE: {
        START:         _HOSTCACHE_ANY,
        "loaded":      _HOSTCACHE_ANY,
        "stored":      _HOSTCACHE_ANY,
        "corrupt":     _HOSTCACHE_ANY,
        "evicted_under_lease_refused": _HOSTCACHE_ANY,
        "storage_failed": _HOSTCACHE_ANY,
    },
}
# fmt: on

# (role, event) → one of these exists for the same attempt, wherever it came from.
NEEDS: Mapping[tuple[str, str], tuple[tuple[str, str], ...]] = {
    (PREFILL, "queued"): ((ROUTER, "routed"),),
    (DECODE, "reserved"): ((PREFILL, "queued"),),
    (DECODE, "verified"): ((PREFILL, "chunk"), (PREFILL, "handed_off")),
    (PREFILL, "handed_off"): ((DECODE, "verified"),),
    (ROUTER, "finished"): ((DECODE, "first_token"),),
}


@dataclass(frozen=True, slots=True)
class LifecycleEvent:
    """One event. `seq` counts from 1 what this publisher said of this request.

    `unix_ms` is for reading only and `elapsed_ms` counts since the request came to this publisher;
    neither orders anything. `facts` are named numbers and short words, never content.
    """

    role: str
    worker_id: str
    epoch: int
    request_id: str
    attempt: int
    seq: int
    name: str
    facts: Mapping[str, object]
    unix_ms: int = 0
    elapsed_ms: float = 0.0
    traceparent: str = ""

    @property
    def publisher(self) -> tuple[str, str, int]:
        return self.role, self.worker_id, self.epoch

    @property
    def lost(self) -> tuple[int, int]:
        """The sequence numbers [first, last] that a gap stands for."""
        first, last = self.facts.get("from", 0), self.facts.get("to", -1)
        assert isinstance(first, int)
        assert isinstance(last, int)
        return first, last


@dataclass(frozen=True, slots=True)
class Violation:
    """Something in the log of one request that cannot be; `rule` is its stable name."""

    request_id: str
    attempt: int
    rule: str
    detail: str


def check(events: Iterable[LifecycleEvent]) -> list[Violation]:
    """Everything illegal in these logs, any number of requests and publishers mixed."""
    by_request: dict[str, list[LifecycleEvent]] = {}
    for event in events:
        by_request.setdefault(event.request_id, []).append(event)
    return [found for log in by_request.values() for found in _check_request(log)]


def is_over(events: Iterable[LifecycleEvent]) -> bool:
    """Whether the router has ended the one request that these events are about."""
    return any(event.role == ROUTER and not _row(event) for event in events if _is_known(event))


def _check_request(log: list[LifecycleEvent]) -> list[Violation]:
    by_publisher: dict[tuple[str, str, int], list[LifecycleEvent]] = {}
    for event in log:
        by_publisher.setdefault(event.publisher, []).append(event)
    found = [_violation(event, "unknown_event", "") for event in log if not _is_known(event)]
    for said in by_publisher.values():
        ordered = sorted(filter(_is_known, said), key=lambda event: event.seq)
        found += _check_sequence(ordered)
        found += _check_order(ordered)
    return found + _check_needs(log) + _check_one_decode(log)


def _check_sequence(ordered: list[LifecycleEvent]) -> list[Violation]:
    """Numbers run from 1 without repetition, and a gap accounts for each that is absent."""
    found, last = [], 0
    for event in ordered:
        first = event.seq
        if event.name == GAP:
            first, end = event.lost
            if end != event.seq - 1:
                found.append(_violation(event, "bad_gap", f"{first} to {end} at {event.seq}"))
        if event.seq == last:
            found.append(_violation(event, "repeated_seq", f"{event.seq} twice"))
        elif first > last + 1:
            found.append(_violation(event, "missing_seq", f"{last + 1} to {first - 1} are absent"))
        last = event.seq
    return found


def _check_order(ordered: list[LifecycleEvent]) -> list[Violation]:
    gaps = [event.seq for event in ordered if event.name == GAP]
    said = [event for event in ordered if event.name != GAP]
    if said and said[0].role == ROUTER:
        attempts = pairwise(said)
        found = [
            _violation(after, "attempt_went_back", f"after {before.attempt}")
            for before, after in attempts
            if after.attempt < before.attempt
        ]
        return found + _check_line(said, gaps)
    lines: dict[int, list[LifecycleEvent]] = {}
    for event in said:
        lines.setdefault(event.attempt, []).append(event)
    return [found for line in lines.values() for found in _check_line(line, gaps)]


def _check_line(line: list[LifecycleEvent], gaps: list[int]) -> list[Violation]:
    """Follows the table along what one publisher said."""
    found, name, seq = [], START, 0
    for event in line:
        allowed = FOLLOWS[event.role][name]
        lost_some = any(seq < gap < event.seq for gap in gaps)
        if event.name not in allowed and (not allowed or not lost_some):
            found.append(_violation(event, "illegal_order", f"after {name or 'nothing'}"))
        name, seq = event.name, event.seq
    return found


def _check_needs(log: list[LifecycleEvent]) -> list[Violation]:
    """Looks for causes, but for attempts that were given up: their worker may have died unheard."""
    if any(event.role == ROUTER and event.name in _ROUTER_ENDS for event in log):
        return []
    last_attempt = max(event.attempt for event in log)
    last = [event for event in log if event.attempt == last_attempt]
    existing = {(event.role, event.name) for event in last}
    silent = {event.role for event in log if event.name == GAP}
    found = []
    for event in last:
        needs = NEEDS.get((event.role, event.name), ())
        lacks = needs and existing.isdisjoint(needs)
        if lacks and silent.isdisjoint(role for role, _ in needs):
            words = " or ".join(f"{role}.{name}" for role, name in needs)
            found.append(_violation(event, "missing_cause", f"without {words}"))
    return found


def _check_one_decode(log: list[LifecycleEvent]) -> list[Violation]:
    """Only one process may take over an attempt."""
    owners: dict[int, tuple[str, str, int]] = {}
    found = []
    for event in log:
        if (event.role, event.name) == (DECODE, "verified"):
            owner = owners.setdefault(event.attempt, event.publisher)
            if owner != event.publisher:
                found.append(_violation(event, "two_decoders", f"{owner[1]} has it"))
    return found


def _is_known(event: LifecycleEvent) -> bool:
    rows = FOLLOWS.get(event.role, {})
    return bool(rows) and event.name != START and (event.name == GAP or event.name in rows)


def _row(event: LifecycleEvent) -> tuple[str, ...]:
    return FOLLOWS[event.role].get(event.name, (GAP,))


def _violation(event: LifecycleEvent, rule: str, detail: str) -> Violation:
    said = f"{event.role}.{event.name} of {event.worker_id} {detail}".rstrip()
    return Violation(event.request_id, event.attempt, rule, said)
