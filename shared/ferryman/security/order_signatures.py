"""Signatures by which workers know a router's order from one that somebody else has made up.

A router's gRPC token is seen by each worker that it calls, and a worker passes orders on to another
one. So a token says too little: the router signs what it orders (Ed25519, RFC 8032), with a key
that no other role's file has, and a worker checks the signature before it changes anything.

Only bytes are signed. `statement` makes them from a purpose and values: equal values of one purpose
give equal bytes, other values or another purpose give others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache
from numbers import Real
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SEED_BYTES, SIGNATURE_BYTES = 32, 64


class OrderSigner:
    """The private half of a signing key, from its seed in hex. Raises ValueError for another
    text."""

    def __init__(self, seed: str) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(seed))

    @property
    def public_key(self) -> str:
        """The public half, in hex."""
        return self._key.public_key().public_bytes_raw().hex()

    def sign(self, signed: bytes) -> bytes:
        """SIGNATURE_BYTES, the same for the same bytes."""
        return self._key.sign(signed)


class OrderVerifier:
    """The public halves, in hex, of the keys that are believed. Raises ValueError for other
    texts."""

    def __init__(self, public_keys: Iterable[str]) -> None:
        self._keys = tuple(_public_key(text) for text in public_keys)

    def verifies(self, signature: bytes, signed: bytes) -> bool:
        """Whether a believed key made this signature of exactly these bytes."""
        return any(_is_by(key, signature, signed) for key in self._keys)


@lru_cache(maxsize=16)
def _public_key(text: str) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(bytes.fromhex(text))


def _is_by(key: Ed25519PublicKey, signature: bytes, signed: bytes) -> bool:
    try:
        key.verify(signature, signed)
    except InvalidSignature:
        return False
    return True


def statement(purpose: str, *values: Any) -> bytes:
    """The bytes to sign: `purpose`, then each value. Raises TypeError for a value of a kind that
    has no encoding."""
    return _encoded((f"ferryman {purpose} v1", *values))


def _encoded(value: Any) -> bytes:
    """A letter for the kind of value, its length, and its bytes. No two values share an encoding,
    but for numbers that are equal: what one process writes as 1, another may read as 1.0."""
    match value:
        case None:
            return b"n"
        case Enum():
            return _encoded(value.value)
        case bool() | int() | Real():
            return _number(value)
        case str():
            return _framed(b"s", value)
        case bytes():
            return _framed(b"b", value)
        case frozenset():
            return _encoded(tuple(sorted(value)))
        case Sequence():
            return _framed(b"t", b"".join(map(_encoded, value)))
        case _ if is_dataclass(value):
            named = ((field.name, getattr(value, field.name)) for field in fields(value))
            return _encoded(tuple(named))
    raise TypeError(f"a {type(value).__name__} is not signed")


def _number(value: Any) -> bytes:
    whole = int(value)
    return _framed(b"i", str(whole)) if value == whole else _framed(b"f", float(value).hex())


def _framed(kind: bytes, content: str | bytes) -> bytes:
    raw = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    return kind + len(raw).to_bytes(8, "little") + raw
