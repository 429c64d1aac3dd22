"""The smallest parts of messages: token ids, page keys, kinds, finish reasons, durations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, TypeVar

import numpy as np

from ferryman.cache.keys import KEY_BYTES, PageKey, TokenIds, as_token_ids
from ferryman.cache.manifest import Exactness, Kind
from ferryman.errors import InvalidRequest, TooLarge
from ferryman.schedule.request import FinishReason
from ferryman.wire.codec.message_table import At
from ferryman.wire.v1 import types_pb2

E = TypeVar("E", bound=Enum)

MAX_TOKEN_BYTES = 4 << 20
DIGEST_BYTES = 16
MAX_DURATION_MS = 2**31 - 1  # three weeks


def numbers_of(members: Iterable[E], message_enum: Any, prefix: str) -> dict[E, Any]:
    """The number of each member in a message's enum, whose names begin with a prefix."""
    return {member: message_enum.Value(f"{prefix}_{member.name}") for member in members}


_KINDS: dict[Kind, types_pb2.Kind] = numbers_of(Kind, types_pb2.Kind, "KIND")
_KINDS_BACK = {number: kind for kind, number in _KINDS.items()}
_REASONS: dict[FinishReason, types_pb2.FinishReason] = numbers_of(
    FinishReason, types_pb2.FinishReason, "FINISH_REASON"
)
_REASONS_BACK = {number: reason for reason, number in _REASONS.items()}
_LEVELS: dict[Exactness, types_pb2.Exactness] = numbers_of(
    Exactness, types_pb2.Exactness, "EXACTNESS"
)
_LEVELS_BACK: dict[int, Exactness] = {number: level for level, number in _LEVELS.items()}


def token_ids_to_bytes(token_ids: Sequence[int] | TokenIds) -> bytes:
    return as_token_ids(token_ids).tobytes()


def token_ids_from_bytes(raw: bytes) -> TokenIds:
    """Token ids [tokens], read-only; InvalidRequest when the bytes are not whole u32 numbers."""
    if len(raw) % 4:
        raise InvalidRequest(f"token_ids has {len(raw)} bytes, not 4 for each token", "token_ids")
    if len(raw) > MAX_TOKEN_BYTES:
        raise TooLarge(f"token_ids has more than {MAX_TOKEN_BYTES} bytes", "token_ids")
    return np.frombuffer(raw, dtype="<u4")


def keys_to_bytes(keys: Iterable[PageKey]) -> bytes:
    return b"".join(keys)


def keys_from_bytes(raw: bytes) -> tuple[PageKey, ...]:
    if len(raw) % KEY_BYTES:
        raise InvalidRequest(f"page keys have {KEY_BYTES} bytes each, not {len(raw)}", "page_keys")
    return tuple(raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES))


def key_from_bytes(raw: bytes) -> PageKey:
    if len(raw) != KEY_BYTES:
        raise InvalidRequest(f"a page key has {KEY_BYTES} bytes, not {len(raw)}", "key")
    return raw


def digest_from_bytes(raw: bytes) -> bytes:
    if len(raw) != DIGEST_BYTES:
        raise InvalidRequest(f"a unit's digest has {DIGEST_BYTES} bytes, not {len(raw)}", "digest")
    return raw


def kind_to_wire(kind: Kind) -> types_pb2.Kind:
    return _KINDS[kind]


def kind_from_wire(number: int) -> Kind:
    try:
        return _KINDS_BACK[number]  # type: ignore[index]
    except KeyError:
        raise InvalidRequest(f"there is no state kind {number}", "kind") from None


def finish_to_wire(reason: FinishReason) -> types_pb2.FinishReason:
    return _REASONS[reason]


def finish_from_wire(number: int) -> FinishReason:
    try:
        return _REASONS_BACK[number]  # type: ignore[index]
    except KeyError:
        raise InvalidRequest(f"there is no finish reason {number}", "finish_reason") from None


def exactness_to_wire(level: Exactness) -> types_pb2.Exactness:
    return _LEVELS[level]


def exactness_from_wire(number: int) -> Exactness:
    """A message that says nothing about it promises no bits."""
    return _LEVELS_BACK.get(number, Exactness.VALUES)


def milliseconds(seconds: float) -> int:
    """Rounded up beyond a microsecond: a deadline never ends early."""
    return max(0, math.ceil(round(seconds * 1000, 3)))


def bounded_seconds(milliseconds: int, field: str) -> float:
    """Seconds of a duration that timers can wait for; InvalidRequest for a longer one."""
    if milliseconds > MAX_DURATION_MS:
        raise InvalidRequest(f"{field} is above {MAX_DURATION_MS}", field)
    return seconds(milliseconds)


def seconds(milliseconds: int) -> float:
    return milliseconds / 1000


KIND = At(kind_to_wire, kind_from_wire)
FINISH = At(finish_to_wire, finish_from_wire, "finish_reason")
EXACTNESS = At(exactness_to_wire, exactness_from_wire)
