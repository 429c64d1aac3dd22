"""Requests and results of a prefetch: from storage and other nodes into host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from ferryman.cache.keys import PageKey
from ferryman.cache.units import Tier

TIMEOUT_SECONDS = 1.0
TIMEOUT_SECONDS_PER_TOKEN = 0.25 / 1024


class PrefetchPolicy(StrEnum):
    """The time that the caller waits for the units that got room.

    best_effort: no wait; units that have arrived up to a resume point count, and a prefetch that
    starts now goes on for later requests. wait_complete: until all units are there. timeout: at
    most 1 s and 0.25 s for each 1,024 tokens.
    """

    BEST_EFFORT = "best_effort"
    WAIT_COMPLETE = "wait_complete"
    TIMEOUT = "timeout"

    def seconds(self, num_tokens: int) -> float:
        """The longest wait, from the start, for a prefetch of so many tokens."""
        match self:
            case PrefetchPolicy.BEST_EFFORT:
                return 0.0
            case PrefetchPolicy.WAIT_COMPLETE:
                return float("inf")
            case PrefetchPolicy.TIMEOUT:
                return TIMEOUT_SECONDS + TIMEOUT_SECONDS_PER_TOKEN * num_tokens


@dataclass(frozen=True, slots=True)
class PrefetchOptions:
    """The end of a caller's prefetch, and the least gain in tokens for which it wants one."""

    policy: PrefetchPolicy = PrefetchPolicy.TIMEOUT
    threshold_tokens: int = 256


DEFAULT_WISH = PrefetchOptions()


class PrefetchShortfall(StrEnum):
    """The reason why pages of a slower tier were not brought; plans use the same words."""

    HOST_FULL = "host_full"
    STORAGE_TIMEOUT = "storage_timeout"
    BELOW_THRESHOLD = "below_threshold"
    RATE_LIMITED = "rate_limited"
    TIER_FAILED = "tier_failed"


@dataclass(frozen=True, slots=True)
class PrefetchRequest:
    """A request to prefetch the chain `keys`: resume points above `have_pages` and at `max_pages`
    at most, if the gain is `threshold_tokens` or more."""

    keys: Sequence[PageKey]
    have_pages: int
    max_pages: int
    threshold_tokens: int


@dataclass(frozen=True, slots=True, order=True)
class UnitOrigin:
    """The tier that a unit was brought from. `folder` names the node whose folder of the bucket it
    was in, if that is another node."""

    tier: Tier
    folder: str = ""


OWN_STORAGE = UnitOrigin(Tier.STORAGE)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Units that came from one tier, verified. `seconds` adds up the times of its reads."""

    num_units: int = 0
    num_bytes: int = 0
    seconds: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.num_units + other.num_units,
            self.num_bytes + other.num_bytes,
            self.seconds + other.seconds,
        )


@dataclass(frozen=True, slots=True)
class Prefetched:
    """The reach of the host tier, in pages from page 0, each the end of a resume set.

    `before_pages` at the start; `asked_pages` with every unit of the slower tiers; `granted_pages`
    with the units that got room; `brought_pages` now. `reason` is a `PrefetchShortfall`, or empty
    when nothing is lacking; a shortfall runs from brought_pages to asked_pages.
    """

    before_pages: int = 0
    asked_pages: int = 0
    granted_pages: int = 0
    brought_pages: int = 0
    is_truncated: bool = False
    reason: str = ""
    traffic: Mapping[Tier, Traffic] = field(default_factory=dict)

    @property
    def num_bytes(self) -> dict[Tier, int]:
        return {tier: traffic.num_bytes for tier, traffic in self.traffic.items()}


NOTHING_BROUGHT = Prefetched()
