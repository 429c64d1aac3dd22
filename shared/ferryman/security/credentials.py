"""The secrets by which processes of each role show who they are, all made from the cluster key.

Each secret is HKDF-SHA256 (RFC 5869) of the key, bound to a role and a use. So a restart makes the
same ones, and none of them leads to another or to the key. A process is given those of
its own role alone; of other roles' gRPC tokens it knows digests, enough to recognise a token that
it is shown and useless for showing one. Routers sign their orders with a key whose private half is
theirs alone; all know the public half. `repr` leaves all secrets out.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ferryman.security.cluster_key import ClusterKey
from ferryman.security.order_signatures import OrderSigner

SALT = b"ferryman credentials v1"
SECRET_BYTES = 32
NO_SEED = ""
_HASH_BYTES = 32


class ClusterRole(StrEnum):
    """The roles that have credentials. An observer reads; it is for people and their tools."""

    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
    HOST_CACHE = "hostcache"
    OBSERVER = "observer"


@dataclass(frozen=True, slots=True)
class Login:
    """A name and a password for a server."""

    user: str
    password: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class RoleCredentials:
    """The credentials of one role: for NATS, for Redis, and for gRPC.

    `token_digests` has the SHA-256, in hex, of the gRPC token of every role, by role. `order_keys`
    are the public keys, in hex, of which one has signed each order of a router; `signing_seed` is
    the private half of the first, in hex, in a router's credentials, and empty in all others.
    """

    role: ClusterRole
    nats: Login
    redis: Login
    grpc_token: str = field(repr=False)
    token_digests: Mapping[ClusterRole, str] = field(repr=False)
    order_keys: tuple[str, ...] = field(repr=False)
    signing_seed: str = field(repr=False)

    def role_of(self, token: str) -> ClusterRole | None:
        """The role whose gRPC token this is, of this cluster; None for any other text."""
        digest, matching = token_digest(token), None
        # All are compared, each in constant time: the answer's time reveals nothing of them.
        for role, role_digest in self.token_digests.items():
            if hmac.compare_digest(digest, role_digest):
                matching = role
        return matching


def credentials_of(key: ClusterKey, role: ClusterRole) -> RoleCredentials:
    """The credentials of a role in the cluster with this key."""
    seed = _secret(key, ClusterRole.ROUTER, "orders")
    return RoleCredentials(
        role=role,
        nats=Login(role.value, _secret(key, role, "nats")),
        redis=Login(role.value, _secret(key, role, "redis")),
        grpc_token=_secret(key, role, "grpc"),
        token_digests={other: token_digest(_secret(key, other, "grpc")) for other in ClusterRole},
        order_keys=(OrderSigner(seed).public_key,),
        signing_seed=seed if role is ClusterRole.ROUTER else NO_SEED,
    )


def token_digest(token: str) -> str:
    """SHA-256 of a token, in hex. A token has 256 random bits, so a plain hash is enough."""
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()


def _secret(key: ClusterKey, role: ClusterRole, use: str) -> str:
    """64 hexadecimal digits: they need no escape in any server's configuration."""
    info = f"{role.value} {use}".encode()
    return hkdf_sha256(key.secret, salt=SALT, info=info, num_bytes=SECRET_BYTES).hex()


def hkdf_sha256(secret: bytes, *, salt: bytes, info: bytes, num_bytes: int) -> bytes:
    """HKDF with SHA-256: extract, then expand to at most 255 × 32 bytes. Source: RFC 5869, 2."""
    assert 0 < num_bytes <= 255 * _HASH_BYTES, f"HKDF gives no {num_bytes} bytes"
    pseudorandom_key = hmac.digest(salt or bytes(_HASH_BYTES), secret, "sha256")
    block, blocks, count = b"", b"", 0
    while len(blocks) < num_bytes:
        count += 1
        block = hmac.digest(pseudorandom_key, block + info + bytes([count]), "sha256")
        blocks += block
    return blocks[:num_bytes]
