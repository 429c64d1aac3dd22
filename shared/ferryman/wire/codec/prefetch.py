"""Requests and answers of prefetches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ferryman.cache.units import Tier
from ferryman.tiers.prefetch_values import Prefetched, PrefetchPolicy, PrefetchShortfall, Traffic
from ferryman.wire.codec.caches import tier_from_wire, tier_to_wire
from ferryman.wire.codec.message_table import At, same, table
from ferryman.wire.codec.scalars import numbers_of
from ferryman.wire.v1 import hostcache_pb2 as pb

MICROS = 1_000_000

_POLICIES: dict[PrefetchPolicy, pb.PrefetchPolicy] = numbers_of(
    PrefetchPolicy, pb.PrefetchPolicy, "PREFETCH_POLICY"
)
_LACKS = frozenset(map(str, PrefetchShortfall))
_POLICIES_BACK = {number: policy for policy, number in _POLICIES.items()}


def policy_to_wire(policy: PrefetchPolicy) -> pb.PrefetchPolicy:
    return _POLICIES[policy]


def policy_from_wire(number: int, otherwise: PrefetchPolicy) -> PrefetchPolicy:
    """`otherwise` replaces a policy that is missing or unknown."""
    return _POLICIES_BACK.get(number, otherwise)  # type: ignore[call-overload,no-any-return]


def traffic_to_wire(traffic: Mapping[Tier, Traffic]) -> list[pb.TierTraffic]:
    return [
        pb.TierTraffic(
            tier=tier_to_wire(tier),
            units=amount.num_units,
            num_bytes=amount.num_bytes,
            micros=round(amount.seconds * MICROS),
        )
        for tier, amount in traffic.items()
    ]


def traffic_from_wire(messages: Iterable[pb.TierTraffic]) -> dict[Tier, Traffic]:
    return {
        tier_from_wire(message.tier): Traffic(
            message.units, message.num_bytes, message.micros / MICROS
        )
        for message in messages
    }


def _known_reason(reason: str) -> str:
    """An unknown reason becomes empty, because a plan could not name it."""
    return reason if reason in _LACKS else ""


prefetched_to_wire, prefetched_from_wire = table(
    Prefetched,
    pb.PrefetchResponse,
    reason=At(same, _known_reason),
    traffic=At(traffic_to_wire, traffic_from_wire),
)
