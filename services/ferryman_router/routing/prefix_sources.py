"""Finds a prompt's prefix: on a worker's device, by its own reports, and on other tiers. Pure.

Cache events are numbered. After a missing one nothing is certain, so later events are kept aside
until a snapshot has shown what there is.

    usable prefix = deepest position that every kind can resume from:
        full       every page before it       (evicted leaf first: presence is prefix-closed)
        window     the pages its window meets
        recurrent  the snapshot at just that page end

How the rest would come to the worker, tier by tier, and what that costs:

    device │ host │ storage │ peer     tokens from 0 on; each tier adds what those before lack
           load ──────────────────     bytes into the device, at the worker's learned pace
                  fetch ──────────     bytes into the host tier, at the host-cache's

The worker will plan by the same sum: loading seconds and computing seconds, the least of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, ResumeShape
from ferryman.cache.resume import max_resume_pages, resume_set
from ferryman.handoff.usage import CachedTokens
from ferryman.wire.codec.caches import CacheEvent, CacheSnapshot

MAX_WAITING = 1024


class WorkerCacheIndex:
    """The keys of one life of one worker; nothing is known before its first snapshot."""

    def __init__(self, shape: ResumeShape) -> None:
        self._keys: dict[Kind, set[PageKey]] = {kind: set() for kind in shape.kinds}
        self._shape = shape
        self._sequence: int | None = None
        self._waiting: dict[int, CacheEvent] = {}

    def apply(self, event: CacheEvent) -> bool:
        """Takes an event in; False when a snapshot must be asked for (once for every gap)."""
        if self._sequence is not None and event.sequence <= self._sequence:
            return True
        had_gap = bool(self._waiting) or self._sequence is None
        if len(self._waiting) < MAX_WAITING:
            self._waiting[event.sequence] = event
        self._catch_up()
        return had_gap or not self._waiting

    def replace(self, snapshot: CacheSnapshot) -> bool:
        """Starts over from a snapshot; False when events after it are missing as well."""
        if self._sequence is not None and snapshot.sequence < self._sequence:
            return True
        for kind, keys in self._keys.items():
            keys.clear()
            keys.update(snapshot.held.get(kind, ()))
        self._sequence = snapshot.sequence
        self._waiting = {n: e for n, e in self._waiting.items() if n > snapshot.sequence}
        self._catch_up()
        return not self._waiting

    def _catch_up(self) -> None:
        while self._sequence is not None and self._sequence + 1 in self._waiting:
            self._sequence += 1
            event = self._waiting.pop(self._sequence)
            for kind, keys in event.removed.items():
                self._keys.setdefault(kind, set()).difference_update(keys)
            for kind, keys in event.stored.items():
                self._keys.setdefault(kind, set()).update(keys)

    # Matching.

    def depth(self, keys: Sequence[PageKey]) -> int:
        """Full pages held from the root on, by bisection. Without full layers: all of them."""
        if Kind.FULL not in self._keys:
            return len(keys)
        held, low, high = self._keys[Kind.FULL], 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in held:
                low = middle + 1
            else:
                high = middle
        return low

    def usable_tokens(self, keys: Sequence[PageKey], prompt_len: int) -> int:
        """Tokens that need not be computed here; one of the prompt always is."""
        page_size = self._shape.page_size
        limit = max_resume_pages(prompt_len, page_size)
        depth = min(self.depth(keys), limit)
        while depth > 0 and not self._can_resume(keys, depth):
            depth -= 1
        return depth * page_size

    def _can_resume(self, keys: Sequence[PageKey], depth: int) -> bool:
        recurrent, window = self._keys.get(Kind.RECURRENT), self._keys.get(Kind.WINDOW)
        if recurrent is not None and keys[depth - 1] not in recurrent:
            return False
        if window is None:
            return True
        needs = resume_set(self._shape, depth * self._shape.page_size)
        return all(keys[page] in window for page in range(*needs.window))


@dataclass(frozen=True, slots=True)
class PrefixReach:
    """The tokens of a prefix that can be resumed: with the device alone, with the node's host
    tier too, with its storage too, with other nodes too. `matched` are full pages on the device,
    which never need a load."""

    device: int
    matched: int
    host: int
    storage: int
    peer: int

    def fetching(self, threshold: int) -> PrefixReach:
        """The reach if the host-cache skips prefetches that gain fewer than `threshold`
        tokens."""
        is_worth_it = self.peer - self.host >= threshold
        return self if is_worth_it else replace(self, storage=self.host, peer=self.host)


NO_REACH = PrefixReach(0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class FetchRates:
    """Seconds per byte into the device, from storage and from a peer; bytes of a token's pages and
    of a snapshot; seconds to compute a token."""

    load: float
    storage: float
    peer: float
    bytes_per_token: float
    snapshot_bytes: int
    prefill: float


@dataclass(frozen=True, slots=True)
class PrefixFetch:
    """The prefix that is worth having. `device_tokens` of it need nothing from elsewhere;
    `recompute_seconds` is what computing the rest would take instead."""

    device_tokens: int
    cached: CachedTokens
    fetch_seconds: float
    load_seconds: float
    recompute_seconds: float


def best_prefix_fetch(reach: PrefixReach, rates: FetchRates) -> PrefixFetch:
    """The reach with the least seconds, loading and computing together; the shorter of equals."""
    ends = sorted({reach.device, reach.host, reach.storage, reach.peer})
    arrivals = [_arrival(end, reach, rates) for end in ends if end >= reach.device]
    return min(arrivals, key=_seconds_more)


def _seconds_more(arrival: PrefixFetch) -> float:
    """The time added to that of the device alone; below 0 if the fetch is worth it."""
    return arrival.fetch_seconds + arrival.load_seconds - arrival.recompute_seconds


def _arrival(end: int, reach: PrefixReach, rates: FetchRates) -> PrefixFetch:
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
    return PrefixFetch(reach.device, cached, fetch, load * rates.load, recompute)
