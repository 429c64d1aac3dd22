"""Permissions on the index: the commands and keys of each role, as a Redis ACL file.

The default user is off, so a stranger can do nothing. No role may flush, configure, list all keys,
or touch a key that is not the index's. Source: https://redis.io/docs/latest/operate/oss_and_stack/
management/security/acl
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from ferryman.security.credentials import ClusterRole, Login, RoleCredentials

KEYS = "~fm:*"
_CONNECTION = "+ping +hello +auth +client|setname +select"
_SCRIPTS = "+eval +evalsha +script|load"
_READ = "+get +mget +hget +hmget +hkeys +scard +smembers +smismember"
# A lookup removes entries of a node's earlier lives, and can add nothing.
_LOOKUP = f"{_READ} +hdel +srem +del {_SCRIPTS}"
_ROUTER = f"{_LOOKUP} +info"  # it counts Redis's refusals
_HOST_CACHE = f"{_LOOKUP} +set +hset +sadd +expire"
_OBSERVER = "+@read -@dangerous -@scripting +info"
_RULES = {
    ClusterRole.ROUTER: _ROUTER,
    ClusterRole.HOST_CACHE: _HOST_CACHE,
    ClusterRole.OBSERVER: _OBSERVER,
}


def index_acl(credentials: Iterable[RoleCredentials]) -> str:
    """An ACL file with a user for each role that uses the index, and no other. It has digests of
    the passwords, not the passwords."""
    users = [
        f"user {entry.redis.user} reset on #{_digest(entry.redis)} {KEYS} resetchannels -@all"
        f" {_CONNECTION} {_RULES[entry.role]}"
        for entry in credentials
        if entry.role in _RULES
    ]
    return "\n".join(["user default reset off", *users]) + "\n"


def _digest(login: Login) -> str:
    return hashlib.sha256(login.password.encode()).hexdigest()
