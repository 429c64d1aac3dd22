"""Prefetches, asked for and answered."""

from __future__ import annotations

from collections.abc import Mapping

from ferryman.cache.units import Tier
from ferryman.tiers.prefetch_values import Lack, Prefetched, PrefetchPolicy, Traffic
from ferryman.wire.codec.caches import tier_from_wire, tier_to_wire
from ferryman.wire.v1 import hostcache_pb2 as pb

MICROS = 1_000_000

_POLICIES: dict[PrefetchPolicy, pb.PrefetchPolicy] = {
    PrefetchPolicy.BEST_EFFORT: pb.PREFETCH_POLICY_BEST_EFFORT,
    PrefetchPolicy.WAIT_COMPLETE: pb.PREFETCH_POLICY_WAIT_COMPLETE,
    PrefetchPolicy.TIMEOUT: pb.PREFETCH_POLICY_TIMEOUT,
}
_LACKS = frozenset(map(str, Lack))
_POLICIES_BACK = {number: policy for policy, number in _POLICIES.items()}


def policy_to_wire(policy: PrefetchPolicy) -> pb.PrefetchPolicy:
    return _POLICIES[policy]


def policy_from_wire(number: int, otherwise: PrefetchPolicy) -> PrefetchPolicy:
    """`otherwise` when none was named, or none that is known here."""
    return _POLICIES_BACK.get(number, otherwise)  # type: ignore[call-overload,no-any-return]


def traffic_to_wire(traffic: Mapping[Tier, Traffic]) -> list[pb.TierTraffic]:
    return [
        pb.TierTraffic(
            tier=tier_to_wire(tier),
            units=each.num_units,
            num_bytes=each.num_bytes,
            micros=round(each.seconds * MICROS),
        )
        for tier, each in traffic.items()
    ]


def prefetched_to_wire(prefetched: Prefetched) -> pb.PrefetchResponse:
    return pb.PrefetchResponse(
        before_pages=prefetched.before_pages,
        asked_pages=prefetched.asked_pages,
        granted_pages=prefetched.granted_pages,
        brought_pages=prefetched.brought_pages,
        is_truncated=prefetched.is_truncated,
        reason=prefetched.reason,
        traffic=traffic_to_wire(prefetched.traffic),
    )


def prefetched_from_wire(message: pb.PrefetchResponse) -> Prefetched:
    """A reason that is not known here is none: a plan could not name it."""
    return Prefetched(
        before_pages=message.before_pages,
        asked_pages=message.asked_pages,
        granted_pages=message.granted_pages,
        brought_pages=message.brought_pages,
        is_truncated=message.is_truncated,
        reason=message.reason if message.reason in _LACKS else "",
        traffic={
            tier_from_wire(each.tier): Traffic(each.units, each.num_bytes, each.micros / MICROS)
            for each in message.traffic
        },
    )
