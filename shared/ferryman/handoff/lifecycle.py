"""The lifecycle of a request as events that any process may publish, and the rules of their order.

Publishers are concurrent, so order is compared in two ways only. Within one publisher, by its own
sequence number: the tables FOLLOWS. Across publishers, by cause: the table NEEDS. Whether a chunk
was published before or after the first token means nothing.

A publisher that had to drop events reports `gap {from, to}`; across a gap anything may have
happened, except that an ended request goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

ROUTER, PREFILL, DECODE, HOSTCACHE = "router", "prefill", "decode", "hostcache"
GAP = "gap"
AUDITED = "audited"
START = ""

_ROUTER_ENDS = ("failed", "cancelled")
_HOSTCACHE_ANY = ("loaded", "stored", "corrupt", "evicted_under_lease_refused", "storage_failed")
_DECODE_GOES_ON = ("progress", "retracted", "detached", "finished", "aborted")

# An empty tuple is an end, and so is AUDITED alone. The router's order covers all attempts of a
# request; the other roles' order covers one attempt. A prefill that was retracted, or that met a
# corrupt load, is admitted again. A decode worker that drains detaches a request, and hands it off
# in the next attempt. A request that decode has finished may be audited, long after its caller has
# the answer.
# fmt: off
FOLLOWS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    ROUTER: {
        START:         ("received", "taken_over"),
        "received":    ("routed", "rejected", *_ROUTER_ENDS),
        "taken_over":  ("routed", "rejected", *_ROUTER_ENDS),
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
        START:         ("reserved", "moving"),
        "reserved":    ("loaded", "verified", "aborted"),
        "loaded":      ("verified", "aborted"),
        "verified":    ("first_token", "retracted", "aborted"),
        "first_token": _DECODE_GOES_ON,
        "progress":    _DECODE_GOES_ON,
        "retracted":   ("resumed", "aborted"),
        "resumed":     ("first_token", *_DECODE_GOES_ON),
        "detached":    (),
        "moving":      ("handed_off", "failed", "cancelled"),
        "handed_off":  (),
        "failed":      (),
        "cancelled":   (),
        "finished":    (AUDITED,),
        AUDITED:       (),
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

# (role, event) → at least one of these exists for the same attempt, from any publisher.
NEEDS: Mapping[tuple[str, str], tuple[tuple[str, str], ...]] = {
    (PREFILL, "queued"): ((ROUTER, "routed"),),
    (DECODE, "reserved"): ((PREFILL, "queued"), (DECODE, "moving")),
    (DECODE, "verified"): ((PREFILL, "chunk"), (PREFILL, "handed_off"), (DECODE, "moving")),
    (DECODE, "moving"): ((ROUTER, "routed"),),
    (DECODE, "handed_off"): ((DECODE, "verified"),),
    (PREFILL, "handed_off"): ((DECODE, "verified"),),
    (ROUTER, "finished"): ((DECODE, "first_token"),),
}

# Reasons of decode's `aborted` that end a reservation. After `verified` the request belongs to
# decode and its router, and neither prefill nor a lease can end it.
ENDS_RESERVATIONS = frozenset({"prefill_failed", "cancelled", "reservation_ended", "load_failed"})


@dataclass(frozen=True, slots=True)
class LifecycleEntry:
    """One event. `seq` counts this publisher's events of this request from 1.

    `unix_ms` is for reading only and `elapsed_ms` counts since the request came to this publisher;
    neither gives an order. `facts` are named numbers and short words, never content.
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
    """A contradiction in the log of one request; `rule` is the stable name of its rule."""

    request_id: str
    attempt: int
    rule: str
    detail: str


def check(events: Iterable[LifecycleEntry]) -> list[Violation]:
    """All violations in these logs; events of any requests and publishers may be mixed."""
    by_request: dict[str, list[LifecycleEntry]] = {}
    for event in events:
        by_request.setdefault(event.request_id, []).append(event)
    return [violation for log in by_request.values() for violation in _check_request(log)]


def is_over(events: Iterable[LifecycleEntry]) -> bool:
    """Whether the router that has the one request of these events has ended it. An end reported by
    a router that lost the request to another does not count."""
    by_router = [event for event in events if _is_known(event) and event.role == ROUTER]
    taken = [event for event in by_router if event.name == "taken_over"]
    has_it = max(taken, key=lambda event: event.attempt).publisher if taken else None
    return any(not _row(event) for event in by_router if has_it in (None, event.publisher))


def _check_request(log: list[LifecycleEntry]) -> list[Violation]:
    by_publisher: dict[tuple[str, str, int], list[LifecycleEntry]] = {}
    for event in log:
        by_publisher.setdefault(event.publisher, []).append(event)
    violations = [_violation(event, "unknown_event", "") for event in log if not _is_known(event)]
    for published in by_publisher.values():
        ordered = sorted(filter(_is_known, published), key=lambda event: event.seq)
        violations += _check_sequence(ordered)
        violations += _check_order(ordered)
    return violations + _check_needs(log) + _check_one_decode(log) + _check_whole(log)


def _check_sequence(ordered: list[LifecycleEntry]) -> list[Violation]:
    """Numbers run from 1 without repetition, and a gap event covers each that is missing."""
    violations, last = [], 0
    for event in ordered:
        first = event.seq
        if event.name == GAP:
            first, end = event.lost
            if end != event.seq - 1:
                violations.append(_violation(event, "bad_gap", f"{first} to {end} at {event.seq}"))
        if event.seq == last:
            violations.append(_violation(event, "repeated_seq", f"{event.seq} twice"))
        elif first > last + 1:
            violations.append(
                _violation(event, "missing_seq", f"{last + 1} to {first - 1} are absent")
            )
        last = event.seq
    return violations


def _check_order(ordered: list[LifecycleEntry]) -> list[Violation]:
    gaps = [event.seq for event in ordered if event.name == GAP]
    published = [event for event in ordered if event.name != GAP]
    if published and published[0].role == ROUTER:
        attempts = pairwise(published)
        violations = [
            _violation(after, "attempt_went_back", f"after {before.attempt}")
            for before, after in attempts
            if after.attempt < before.attempt
        ]
        return violations + _check_line(published, gaps)
    lines: dict[int, list[LifecycleEntry]] = {}
    for event in published:
        lines.setdefault(event.attempt, []).append(event)
    return [violation for line in lines.values() for violation in _check_line(line, gaps)]


def _check_line(line: list[LifecycleEntry], gaps: list[int]) -> list[Violation]:
    """Follows the table along the events of one publisher."""
    violations, name, seq = [], START, 0
    for event in line:
        allowed = FOLLOWS[event.role][name]
        lost_some = any(seq < gap < event.seq for gap in gaps)
        is_over = set(allowed) <= {AUDITED}
        if event.name not in allowed and (is_over or not lost_some):
            violations.append(_violation(event, "illegal_order", f"after {name or 'nothing'}"))
        name, seq = event.name, event.seq
    return violations


def _check_needs(log: list[LifecycleEntry]) -> list[Violation]:
    """Looks for causes in the last attempt only: the worker of an earlier one may have died before
    it could publish. Until the router has ended the request, its own events may be missing, because
    it may have died, too."""
    if any(event.role == ROUTER and event.name in _ROUTER_ENDS for event in log):
        return []
    last_attempt = max(event.attempt for event in log)
    last = [event for event in log if event.attempt == last_attempt]
    existing = {(event.role, event.name) for event in last}
    silent = {event.role for event in log if event.name == GAP}
    if not is_over(log):
        silent.add(ROUTER)
    violations = []
    for event in last:
        needs = NEEDS.get((event.role, event.name), ())
        lacks = needs and existing.isdisjoint(needs)
        if lacks and silent.isdisjoint(role for role, _ in needs):
            words = " or ".join(f"{role}.{name}" for role, name in needs)
            violations.append(_violation(event, "missing_cause", f"without {words}"))
    return violations


def _check_one_decode(log: list[LifecycleEntry]) -> list[Violation]:
    """Only one process may take over an attempt."""
    owners: dict[int, tuple[str, str, int]] = {}
    violations = []
    for event in log:
        if (event.role, event.name) == (DECODE, "verified"):
            owner = owners.setdefault(event.attempt, event.publisher)
            if owner != event.publisher:
                violations.append(_violation(event, "two_decoders", f"{owner[1]} has it"))
    return violations


def _check_whole(log: list[LifecycleEntry]) -> list[Violation]:
    """A request that decode took over is ended by its last token, by the router, or by decode
    itself; a request that was ended otherwise has not finished."""
    taken = {(*e.publisher, e.attempt) for e in log if (e.role, e.name) == (DECODE, "verified")}
    aborted = [
        event
        for event in log
        if (event.role, event.name) == (DECODE, "aborted")
        and (*event.publisher, event.attempt) in taken
    ]
    violations = [
        _violation(event, "ended_by_prefill", f"after verified: {event.facts['reason']}")
        for event in aborted
        if event.facts.get("reason") in ENDS_RESERVATIONS
    ]
    lost = {event.attempt for event in aborted}
    for event in log:
        if (event.role, event.name) != (ROUTER, "finished"):
            continue
        reason = event.facts.get("reason")
        if reason == "cancelled":
            violations.append(_violation(event, "cut_answer", "is no end of an answer"))
        elif reason == "length" and event.attempt in lost:
            violations.append(_violation(event, "cut_answer", "though decode had aborted it"))
    return violations


def _is_known(event: LifecycleEntry) -> bool:
    rows = FOLLOWS.get(event.role, {})
    return bool(rows) and event.name != START and (event.name == GAP or event.name in rows)


def _row(event: LifecycleEntry) -> tuple[str, ...]:
    return FOLLOWS[event.role].get(event.name, (GAP,))


def _violation(event: LifecycleEntry, rule: str, detail: str) -> Violation:
    text = f"{event.role}.{event.name} of {event.worker_id} {detail}".rstrip()
    return Violation(event.request_id, event.attempt, rule, text)
