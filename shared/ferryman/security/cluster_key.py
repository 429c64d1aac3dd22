"""The one secret of a cluster, and the keys made from it, one for each purpose.

A process that has the key belongs to the cluster. Its messages to others of the cluster, and its
data in places that others may write to (Redis, a storage folder), carry a tag: a keyed blake2b. A
tag for one purpose is not valid for another, because each purpose has its own key.

Neither kind of key is ever shown: `repr` leaves the bytes out.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from enum import StrEnum

from ferryman.errors import ConfigError

SECRET_BYTES = 32
TAG_BYTES = 16


class Purpose(StrEnum):
    """The purpose of a sub-key. Its text, at most 16 bytes, is part of the derivation."""

    TENANT_SALT = "tenant salt"
    TENANT_NAME = "tenant name"
    STORED_UNIT = "stored unit"
    NODE_RECORD = "node record"
    INDEX_ENTRY = "index entry"
    PEER_ANSWER = "peer answer"
    PEER_UNIT = "peer unit"
    BUCKET = "bucket"
    STATE_FILE = "state file"


@dataclass(frozen=True, slots=True)
class MacKey:
    """A key for one purpose."""

    secret: bytes = field(repr=False)

    def tag(self, *parts: bytes) -> bytes:
        """TAG_BYTES that only a holder of the key can make. Other boundaries give another tag."""
        framed = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
        return hashlib.blake2b(framed, key=self.secret, digest_size=TAG_BYTES).digest()

    def verifies(self, tag: bytes, *parts: bytes) -> bool:
        """Whether a holder of the key made this tag from exactly these parts."""
        return hmac.compare_digest(tag, self.tag(*parts))


@dataclass(frozen=True, slots=True)
class ClusterKey:
    """The secret itself, SECRET_BYTES long. Raises ConfigError for another length."""

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) != SECRET_BYTES:
            raise ConfigError(f"a cluster key has {SECRET_BYTES} bytes, not {len(self.secret)}")

    def subkey(self, purpose: Purpose) -> MacKey:
        """The key for a purpose. It reveals neither the cluster key nor another purpose's key."""
        person = purpose.value.encode()
        return MacKey(hashlib.blake2b(key=self.secret, digest_size=32, person=person).digest())

    @property
    def text(self) -> str:
        """The key as in a file: 64 hexadecimal digits."""
        return self.secret.hex()


def cluster_key_from_text(text: str) -> ClusterKey:
    """Inverse of `ClusterKey.text`; ignores white space around the digits. Raises ConfigError
    without repeating the text."""
    digits = text.strip()
    if len(digits) != 2 * SECRET_BYTES or not set(digits) <= set("0123456789abcdefABCDEF"):
        raise ConfigError(f"a cluster key is {2 * SECRET_BYTES} hexadecimal digits")
    return ClusterKey(bytes.fromhex(digits))
