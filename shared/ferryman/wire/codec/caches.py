"""Units in the host tier, prefetches to it, and events about the device tier."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.cache.units import HostUnit, Tier
from ferryman.errors import InvalidRequest
from ferryman.tiers.prefetch_values import Prefetched, PrefetchPolicy, PrefetchShortfall, Traffic
from ferryman.wire.codec.message_table import At, same, table
from ferryman.wire.codec.scalars import (
    digest_from_bytes,
    key_from_bytes,
    keys_from_bytes,
    keys_to_bytes,
    kind_from_wire,
    kind_to_wire,
    numbers_of,
)
from ferryman.wire.v1 import events_pb2, hostcache_pb2, types_pb2

M = TypeVar("M", bound=Message)
Keys = Mapping[Kind, tuple[PageKey, ...]]

_TIERS: dict[Tier, hostcache_pb2.Tier] = numbers_of(Tier, hostcache_pb2.Tier, "TIER")
_TIERS_BACK = {number: tier for tier, number in _TIERS.items()}


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """A change of one worker's device cache; `removed` happened before `stored`."""

    worker_id: str
    epoch: int
    sequence: int
    removed: Keys = field(default_factory=dict)
    stored: Keys = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """All keys held after event `sequence`, except `num_omitted` keys that did not fit."""

    worker_id: str
    epoch: int
    sequence: int
    held: Keys
    num_omitted: int = 0


def tier_to_wire(tier: Tier) -> hostcache_pb2.Tier:
    return _TIERS[tier]


def tier_from_wire(number: int) -> Tier:
    """A tier that is missing or unknown becomes the host tier."""
    return _TIERS_BACK.get(number, Tier.HOST)  # type: ignore[call-overload,no-any-return]


# By hand: an answer has one for each unit it leases.


def host_unit_to_wire(unit: HostUnit) -> hostcache_pb2.HostUnit:
    return hostcache_pb2.HostUnit(
        kind=kind_to_wire(unit.kind),
        page_index=unit.page_index,
        key=unit.key,
        offset=unit.offset,
        num_bytes=unit.num_bytes,
        digest=unit.digest,
        origin=tier_to_wire(unit.origin),
    )


def host_unit_from_wire(message: hostcache_pb2.HostUnit) -> HostUnit:
    return HostUnit(
        kind=kind_from_wire(message.kind),
        page_index=message.page_index,
        key=key_from_bytes(message.key),
        offset=message.offset,
        num_bytes=message.num_bytes,
        digest=digest_from_bytes(message.digest),
        origin=tier_from_wire(message.origin),
    )


def _key_sets(keys: Keys) -> list[events_pb2.KeySet]:
    return [
        events_pb2.KeySet(kind=kind_to_wire(kind), keys=keys_to_bytes(some))
        for kind, some in keys.items()
    ]


def _keys(messages: Iterable[events_pb2.KeySet]) -> dict[Kind, tuple[PageKey, ...]]:
    return {kind_from_wire(message.kind): keys_from_bytes(message.keys) for message in messages}


def _parsed(kind: type[M], raw: bytes) -> M:
    """Parses a message that came over NATS as bytes."""
    message = kind()
    try:
        message.ParseFromString(raw)
    except DecodeError as error:
        raise InvalidRequest(f"these bytes are no {kind.__name__}") from error
    return message


_KEYS = At(_key_sets, _keys)
_EVENT = table(CacheEvent, events_pb2.CacheEvent, removed=_KEYS, stored=_KEYS)
_SNAPSHOT = table(CacheSnapshot, events_pb2.CacheSnapshot, held=_KEYS)


def cache_event_to_bytes(event: CacheEvent) -> bytes:
    return _EVENT.to_wire(event).SerializeToString()


def cache_event_from_bytes(raw: bytes) -> CacheEvent:
    return _EVENT.from_wire(_parsed(events_pb2.CacheEvent, raw))


def cache_snapshot_to_bytes(snapshot: CacheSnapshot) -> bytes:
    return _SNAPSHOT.to_wire(snapshot).SerializeToString()


def cache_snapshot_from_bytes(raw: bytes) -> CacheSnapshot:
    return _SNAPSHOT.from_wire(_parsed(events_pb2.CacheSnapshot, raw))


# Requests and answers of prefetches.

MICROS = 1_000_000

_POLICIES: dict[PrefetchPolicy, hostcache_pb2.PrefetchPolicy] = numbers_of(
    PrefetchPolicy, hostcache_pb2.PrefetchPolicy, "PREFETCH_POLICY"
)
_LACKS = frozenset(map(str, PrefetchShortfall))
_POLICIES_BACK = {number: policy for policy, number in _POLICIES.items()}


def policy_to_wire(policy: PrefetchPolicy) -> hostcache_pb2.PrefetchPolicy:
    return _POLICIES[policy]


def policy_from_wire(number: int, otherwise: PrefetchPolicy) -> PrefetchPolicy:
    """`otherwise` replaces a policy that is missing or unknown."""
    return _POLICIES_BACK.get(number, otherwise)  # type: ignore[call-overload,no-any-return]


def traffic_to_wire(traffic: Mapping[Tier, Traffic]) -> list[hostcache_pb2.TierTraffic]:
    return [
        hostcache_pb2.TierTraffic(
            tier=tier_to_wire(tier),
            units=amount.num_units,
            num_bytes=amount.num_bytes,
            micros=round(amount.seconds * MICROS),
        )
        for tier, amount in traffic.items()
    ]


def traffic_from_wire(messages: Iterable[hostcache_pb2.TierTraffic]) -> dict[Tier, Traffic]:
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
    hostcache_pb2.PrefetchResponse,
    reason=At(same, _known_reason),
    traffic=At(traffic_to_wire, traffic_from_wire),
)


def pages_from_ranges(
    ranges: Iterable[types_pb2.PageRange], num_pages: int
) -> dict[Kind, list[int]]:
    """The pages of ranges, by kind; for the recurrent kind page i stands for its end. Raises
    InvalidRequest for pages outside `num_pages`."""
    pages: dict[Kind, list[int]] = {}
    for run in ranges:
        if not run.first_page < run.end_page <= num_pages:
            raise InvalidRequest(
                f"pages [{run.first_page}, {run.end_page}) are none of {num_pages}", "units"
            )
        pages.setdefault(kind_from_wire(run.kind), []).extend(range(run.first_page, run.end_page))
    return pages
