"""The files that lock a broker and an index, and the URLs by which observers reach them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from ferryman.security.cluster_key import ClusterKey
from ferryman.security.credentials import ClusterRole, Login, credentials_of
from ferryman.security.credentials_file import write_private_text
from ferryman.wire.nats.permissions import CertificateFiles, broker_config
from ferryman.wire.redis.permissions import index_acl


@dataclass(frozen=True, slots=True)
class ServerAccess:
    """The paths of a configuration of nats-server and an ACL file of Redis."""

    nats_config: Path
    redis_acl: Path


def write_server_access(
    folder: Path, key: ClusterKey, cluster: str, certificate: CertificateFiles | None = None
) -> ServerAccess:
    """Writes both files, readable by their owner alone, into an existing folder. With a
    `certificate` NATS takes TLS alone."""
    access = ServerAccess(folder / "nats.conf", folder / "redis.acl")
    roles = [credentials_of(key, role) for role in ClusterRole]
    write_private_text(access.nats_config, broker_config(roles, cluster, certificate=certificate))
    write_private_text(access.redis_acl, index_acl(roles))
    return access


def with_login(url: str, login: Login) -> str:
    """The URL with a user and a password in it; one that names a user stays as it is."""
    parts = urlsplit(url)
    if "@" in parts.netloc:
        return url
    return urlunsplit(parts._replace(netloc=f"{login.user}:{login.password}@{parts.netloc}"))
