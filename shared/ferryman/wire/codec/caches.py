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
from ferryman.wire.codec.scalars import (
    digest_from_bytes,
    key_from_bytes,
    keys_from_bytes,
    keys_to_bytes,
    kind_from_wire,
    kind_to_wire,
)
from ferryman.wire.v1 import events_pb2, hostcache_pb2

M = TypeVar("M", bound=Message)
Keys = Mapping[Kind, tuple[PageKey, ...]]

_TIERS: dict[Tier, hostcache_pb2.Tier] = {
    Tier.HOST: hostcache_pb2.TIER_HOST,
    Tier.STORAGE: hostcache_pb2.TIER_STORAGE,
    Tier.PEER: hostcache_pb2.TIER_PEER,
}
_TIERS_BACK = {number: tier for tier, number in _TIERS.items()}


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """What changed in one worker's device cache; `removed` happened before `stored`."""

    worker_id: str
    epoch: int
    sequence: int
    removed: Keys = field(default_factory=dict)
    stored: Keys = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """Everything held after event `sequence`, but for `num_omitted` keys that did not fit."""

    worker_id: str
    epoch: int
    sequence: int
    held: Keys
    num_omitted: int = 0


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


def tier_to_wire(tier: Tier) -> hostcache_pb2.Tier:
    return _TIERS[tier]


def tier_from_wire(number: int) -> Tier:
    """A tier that was not named, or that is not known here, is the host's."""
    return _TIERS_BACK.get(number, Tier.HOST)  # type: ignore[call-overload,no-any-return]


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


def cache_event_to_bytes(event: CacheEvent) -> bytes:
    return events_pb2.CacheEvent(
        worker_id=event.worker_id,
        epoch=event.epoch,
        sequence=event.sequence,
        removed=_key_sets(event.removed),
        stored=_key_sets(event.stored),
    ).SerializeToString()


def cache_event_from_bytes(raw: bytes) -> CacheEvent:
    message = _parsed(events_pb2.CacheEvent, raw)
    return CacheEvent(
        worker_id=message.worker_id,
        epoch=message.epoch,
        sequence=message.sequence,
        removed=_keys(message.removed),
        stored=_keys(message.stored),
    )


def cache_snapshot_to_bytes(snapshot: CacheSnapshot) -> bytes:
    return events_pb2.CacheSnapshot(
        worker_id=snapshot.worker_id,
        epoch=snapshot.epoch,
        sequence=snapshot.sequence,
        held=_key_sets(snapshot.held),
        num_omitted=snapshot.num_omitted,
    ).SerializeToString()


def cache_snapshot_from_bytes(raw: bytes) -> CacheSnapshot:
    message = _parsed(events_pb2.CacheSnapshot, raw)
    return CacheSnapshot(
        worker_id=message.worker_id,
        epoch=message.epoch,
        sequence=message.sequence,
        held=_keys(message.held),
        num_omitted=message.num_omitted,
    )


def _key_sets(keys: Keys) -> list[events_pb2.KeySet]:
    return [
        events_pb2.KeySet(kind=kind_to_wire(kind), keys=keys_to_bytes(some))
        for kind, some in keys.items()
    ]


def _keys(messages: Iterable[events_pb2.KeySet]) -> dict[Kind, tuple[PageKey, ...]]:
    return {kind_from_wire(message.kind): keys_from_bytes(message.keys) for message in messages}


def _parsed(kind: type[M], raw: bytes) -> M:
    """A message that came over NATS, where nobody has parsed it yet."""
    message = kind()
    try:
        message.ParseFromString(raw)
    except DecodeError as error:
        raise InvalidRequest(f"these bytes are no {kind.__name__}") from error
    return message
