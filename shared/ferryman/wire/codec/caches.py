"""Units in the host tier, and events about the device tier."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.cache.units import HostUnit, Tier
from ferryman.errors import InvalidRequest
from ferryman.wire.codec.message_table import At, table
from ferryman.wire.codec.scalars import (
    digest_from_bytes,
    key_from_bytes,
    keys_from_bytes,
    keys_to_bytes,
    kind_from_wire,
    kind_to_wire,
    numbers_of,
)
from ferryman.wire.v1 import events_pb2, hostcache_pb2

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
