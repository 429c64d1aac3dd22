"""The files that lock a broker and an index; and for containers a folder of secrets for each
reader, so that it can be mounted alone.

<folder>/ROLE/ROLE.json     the credentials of a role
<folder>/nats/nats.conf     what locks nats-server; redis/redis.acl: what locks Redis
<folder>/observer/nats.url  by which people and their tools may listen; redis.url: may read
<folder>/metrics/token      by which Prometheus may read `/metrics`

With certificates:

<folder>/authority          ca.crt and ca.key with all that they signed: for the maker alone
<folder>/READER/ca.crt      the authorities that are trusted, for every reader
<folder>/ROLE/ROLE.crt|key  the certificate of a role; the router has that of its doors, too
<folder>/nats, redis        each with its own
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from ferryman.errors import ConfigError
from ferryman.security.certificates import certificate_specs, write_certificates
from ferryman.security.cluster_key import ClusterKey
from ferryman.security.credentials import ClusterRole, Login, credentials_of
from ferryman.security.credentials_file import (
    private_folder,
    write_credentials,
    write_private_text,
)
from ferryman.security.tls_folder import AUTHORITIES, DOOR
from ferryman.wire.nats.permissions import CertificateFiles, broker_config
from ferryman.wire.redis.permissions import index_acl

NATS, REDIS, METRICS = "nats", "redis", "metrics"
READERS = (*(role.value for role in ClusterRole), NATS, REDIS, METRICS)
# Asked by the health check inside the container; to strangers it would show the subjects.
MONITOR = "127.0.0.1:8222"
AUTHORITY = "authority"
DAYS = 365
# The certificates of each reader.
_SHOWN: Mapping[str, tuple[str, ...]] = {
    **{role.value: (role.value,) for role in ClusterRole},
    ClusterRole.ROUTER.value: (ClusterRole.ROUTER.value, DOOR),
    NATS: (NATS,),
    REDIS: (REDIS,),
    METRICS: (),
}


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


@dataclass(frozen=True, slots=True)
class ServerUrls:
    """The servers of a cluster, as people reach them, and the cluster's name in subjects."""

    nats: str
    redis: str
    cluster: str


def write_credential_folders(
    folder: Path,
    key: ClusterKey,
    servers: ServerUrls,
    certificate: CertificateFiles | None = None,
) -> None:
    """Writes every file anew, readable by its owner alone, into folders that may exist. With a
    `certificate` NATS takes TLS alone. Raises ConfigError."""
    places = {reader: private_folder(folder / reader) for reader in READERS}
    of_roles = {role: credentials_of(key, role) for role in ClusterRole}
    for role, credentials in of_roles.items():
        write_credentials(places[role.value] / f"{role.value}.json", credentials)
    config = broker_config(of_roles.values(), servers.cluster, MONITOR, certificate)
    write_private_text(places[NATS] / "nats.conf", config)
    write_private_text(places[REDIS] / "redis.acl", index_acl(of_roles.values()))
    observer = of_roles[ClusterRole.OBSERVER]
    # Its readers take it as it is, so no line ends it.
    write_private_text(places[METRICS] / "token", observer.grpc_token)
    urls = {
        "nats.url": with_login(servers.nats, observer.nats),
        "redis.url": with_login(servers.redis, observer.redis),
    }
    for name, url in urls.items():
        write_private_text(places[observer.role.value] / name, url + "\n")


def write_certificate_folders(
    folder: Path, hosts: Sequence[str], now: datetime
) -> CertificateFiles:
    """Makes all certificates anew for these names and addresses, valid for DAYS from `now`, under
    the authority that is kept, and returns the paths of those of NATS. Raises ConfigError."""
    authority = private_folder(folder / AUTHORITY)
    write_certificates(authority, certificate_specs(hosts), DAYS, now, new_ca=False)
    for reader in READERS:
        place = private_folder(folder / reader)
        _copy(AUTHORITIES, authority, place)
        for name in _SHOWN[reader]:
            # Processes that run take a certificate when its key is there.
            _copy(f"{name}.key", authority, place)
            _copy(f"{name}.crt", authority, place)
    return CertificateFiles(folder / NATS / f"{NATS}.crt", folder / NATS / f"{NATS}.key")


def _copy(name: str, source: Path, target: Path) -> None:
    try:
        text = (source / name).read_text()
    except OSError as error:
        raise ConfigError(f"{source / name}: {error.strerror}") from None
    write_private_text(target / name, text)
