"""Credentials for containers: a folder for each reader, so that it can be mounted alone.

<folder>/ROLE/ROLE.json     the credentials of a role
<folder>/nats/nats.conf     what locks nats-server; redis/redis.acl: what locks Redis
<folder>/observer/nats.url  by which people and their tools may listen; redis.url: may read
<folder>/metrics/token      by which Prometheus may read `/metrics`
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ferryman.runtime.server_access import with_login
from ferryman.security.cluster_key import ClusterKey
from ferryman.security.credentials import ClusterRole, credentials_of
from ferryman.security.credentials_file import (
    private_folder,
    write_credentials,
    write_private_text,
)
from ferryman.wire.nats.permissions import CertificateFiles, broker_config
from ferryman.wire.redis.permissions import index_acl

NATS, REDIS, METRICS = "nats", "redis", "metrics"
READERS = (*(role.value for role in ClusterRole), NATS, REDIS, METRICS)
# Asked by the health check inside the container; to strangers it would show the subjects.
MONITOR = "127.0.0.1:8222"


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
