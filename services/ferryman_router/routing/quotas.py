"""The limits of tenants at a router: requests and tokens a minute, requests under way. Pure.

Requests and tokens are counted by token buckets (RFC 2697 calls them so): a full one holds what a
minute allows, and fills evenly. A request takes its prompt's tokens when it comes and its answer's
when it ends, since they are not known before; so a bucket may be in debt, and waits that out. Each
router counts for itself: with two routers a tenant has twice its limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ferryman.errors import RateLimited

MINUTE = 60.0


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """The limits of one tenant; 0: no limit. `share` is its weight against other waiting
    tenants."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_in_flight: int = 0
    share: float = 1.0


NO_LIMITS = TenantLimits()


@dataclass(slots=True)
class _Bucket:
    """`level` is what may be taken at the time `since`."""

    per_minute: int
    level: float
    since: float

    def seconds_until(self, amount: int, now: float) -> float:
        """The time until it holds `amount`, or all that it can hold; 0 without a limit."""
        if not self.per_minute:
            return 0.0
        self._fill(now)
        lacking = min(amount, self.per_minute) - self.level
        return max(0.0, lacking * MINUTE / self.per_minute)

    def take(self, amount: int, now: float) -> None:
        if self.per_minute:
            self._fill(now)
            self.level -= amount

    def _fill(self, now: float) -> None:
        gained = (now - self.since) * self.per_minute / MINUTE
        self.level, self.since = min(self.per_minute, self.level + gained), now


@dataclass(slots=True)
class _Use:
    """The use of one tenant."""

    limits: TenantLimits
    requests: _Bucket
    tokens: _Bucket
    num_in_flight: int = 0

    @classmethod
    def of(cls, limits: TenantLimits, now: float) -> _Use:
        requests, tokens = limits.requests_per_minute, limits.tokens_per_minute
        return cls(limits, _Bucket(requests, requests, now), _Bucket(tokens, tokens, now))


@dataclass(slots=True)
class Quotas:
    """The limits by tenant, and what was used of them. Tenants without limits have none."""

    limits: Mapping[str, TenantLimits] = field(default_factory=dict)
    _uses: dict[str, _Use] = field(default_factory=dict)

    def share(self, tenant: str) -> float:
        """Its weight in the queue."""
        return self.limits.get(tenant, NO_LIMITS).share

    def admit(self, tenant: str, num_tokens: int, now: float) -> None:
        """Takes a request with a prompt of `num_tokens` into account, at `now` in monotonic
        seconds; each must end by `ended`. Raises RateLimited and counts nothing."""
        use = self._use(tenant, now)
        if use.limits.max_in_flight and use.num_in_flight >= use.limits.max_in_flight:
            raise RateLimited(f"{use.num_in_flight} requests of {tenant} are under way", 1.0)
        wanted = ((use.requests, 1, "requests"), (use.tokens, num_tokens, "tokens"))
        for bucket, amount, word in wanted:
            seconds = bucket.seconds_until(amount, now)
            if seconds > 0:
                message = f"{tenant} may use {bucket.per_minute} {word} a minute"
                raise RateLimited(message, seconds)
        use.requests.take(1, now)
        use.tokens.take(num_tokens, now)
        use.num_in_flight += 1

    def ended(self, tenant: str, num_tokens: int, now: float) -> None:
        """An admitted request has ended, with an answer of `num_tokens`."""
        use = self._use(tenant, now)
        use.tokens.take(num_tokens, now)
        use.num_in_flight -= 1

    def _use(self, tenant: str, now: float) -> _Use:
        """Its use so far. With other limits than before it starts with full buckets."""
        limits = self.limits.get(tenant, NO_LIMITS)
        use = self._uses.get(tenant)
        if use is None or use.limits != limits:
            fresh = _Use.of(limits, now)
            fresh.num_in_flight = use.num_in_flight if use else 0
            self._uses[tenant] = use = fresh
        return use
