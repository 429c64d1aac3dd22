"""How a prompt's prefix would come to a prefill worker, tier by tier, and what that costs. Pure.

    device │ host │ storage │ peer     tokens from 0 on; each tier adds what those before lack
           load ──────────────────     bytes into the device, at the worker's learned pace
                  fetch ──────────     bytes into the host tier, at the host-cache's

The worker will plan by the same sum: loading seconds and computing seconds, the least of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ferryman.handoff.usage import CachedTokens


@dataclass(frozen=True, slots=True)
class Reach:
    """How far a prefix can be resumed, in tokens: with the device alone, with the node's host tier
    too, with its storage too, with other nodes too. `matched` are full pages on the device, which
    need not be loaded whatever else is."""

    device: int
    matched: int
    host: int
    storage: int
    peer: int

    def fetching(self, threshold: int) -> Reach:
        """As far as a host-cache brings it that brings nothing for a gain below `threshold`."""
        is_worth_it = self.peer - self.host >= threshold
        return self if is_worth_it else replace(self, storage=self.host, peer=self.host)


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds per byte into the device, from storage and from a peer; bytes of a token's pages and
    of a snapshot; seconds to compute a token."""

    load: float
    storage: float
    peer: float
    bytes_per_token: float
    snapshot_bytes: int
    prefill: float


@dataclass(frozen=True, slots=True)
class Arrival:
    """The prefix that is worth having. `device_tokens` of it need nothing from elsewhere;
    `recompute_seconds` is what computing the rest would take instead."""

    device_tokens: int
    cached: CachedTokens
    fetch_seconds: float
    load_seconds: float
    recompute_seconds: float


def best_arrival(reach: Reach, rates: Rates) -> Arrival:
    """The reach with the least seconds, loading and computing together; the shorter of equals."""
    ends = sorted({reach.device, reach.host, reach.storage, reach.peer})
    arrivals = [_arrival(end, reach, rates) for end in ends if end >= reach.device]
    return min(arrivals, key=_seconds_more)


def _seconds_more(arrival: Arrival) -> float:
    """Than with what is on the device alone; less than nothing where it is worth it."""
    return arrival.fetch_seconds + arrival.load_seconds - arrival.recompute_seconds


def _arrival(end: int, reach: Reach, rates: Rates) -> Arrival:
    marks = (max(reach.device, reach.matched), reach.host, reach.storage, reach.peer)
    counts, at = [], 0
    for mark in marks:
        counts.append(max(0, min(end, mark) - at))
        at += counts[-1]
    cached = CachedTokens(*counts)
    snapshot = rates.snapshot_bytes if end > reach.device else 0
    fetch = (cached.storage * rates.storage + cached.peer * rates.peer) * rates.bytes_per_token
    if end > reach.host:
        fetch += snapshot * (rates.peer if end > reach.storage else rates.storage)
    load = (end - cached.device) * rates.bytes_per_token + snapshot
    recompute = (end - reach.device) * rates.prefill
    return Arrival(reach.device, cached, fetch, load * rates.load, recompute)
