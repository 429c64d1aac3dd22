"""The locks of a cluster: the files that its servers, its services and its observers get.

Observers have URLs, and a context for the NATS command line. That tool looks for
`$XDG_CONFIG_HOME/nats/context/NAME.json`, and for the name of the one to use in `nats/context.txt`.
Source: https://github.com/nats-io/jsm.go/blob/main/natscontext/context.go
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from ferryman.runtime.credential_folders import with_login, write_server_access
from ferryman.runtime.embedded import ServerCommand, redis_command, redis_socket_command
from ferryman.security.cluster_key import ClusterKey
from ferryman.security.credentials import ClusterRole, credentials_of
from ferryman.security.credentials_file import (
    private_folder,
    write_all_credentials,
    write_private_text,
)
from ferryman.security.tls_folder import AUTHORITIES, DOOR, NATS, TlsFolder
from ferryman.wire.grpc.role_tokens import OPEN_TO_ALL, GrpcAccess
from ferryman.wire.nats.permissions import CertificateFiles, inbox_of
from ferryman.wire.redis.connections import check_redis_scheme

REDIS_DEFAULT_USER = "default"
CONTEXT_NAME = "ferryman"
LOOK_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class LockedCluster:
    """Every process shows who it is. `credentials` are the files of services by role."""

    key: ClusterKey
    credentials: Mapping[ClusterRole, Path]
    nats_config: Path
    redis_acl: Path
    tls_dir: Path | None = None

    def settings_of(self, role: str) -> Mapping[str, object]:
        """The settings by which a service of this role finds its credentials."""
        tls = str(self.tls_dir) if self.tls_dir else ""
        return {"credentials_file": self.credentials[ClusterRole(role)], "tls_dir": tls}

    @property
    def ca(self) -> str:
        """The file of authorities; empty without TLS."""
        return str(self.tls_dir / AUTHORITIES) if self.tls_dir else ""

    @property
    def nats_scheme(self) -> str:
        """The scheme of the URL of our own NATS."""
        return "tls" if self.tls_dir else "nats"

    async def watch_broker(self, renew: Callable[[], None]) -> None:
        """Calls `renew` whenever NATS' certificate has changed, for ever."""
        if self.tls_dir is None:
            return
        newest = TlsFolder(self.tls_dir, NATS)
        used = newest()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if newest() is not used:
                used = newest()
                renew()

    def access(self, role: ClusterRole) -> GrpcAccess:
        """The access by which the launcher itself calls services, in a role."""
        tls = TlsFolder(self.tls_dir, role.value) if self.tls_dir else None
        return GrpcAccess(credentials_of(self.key, role), tls)

    def foreign_redis(self, url: str) -> str:
        """The URL for services of a Redis that others run, which knows none of our users: its
        default user, unless the URL names one. With TLS, raises ConfigError for one without."""
        if self.tls_dir:
            check_redis_scheme(url)
        parts = urlsplit(url)
        if "@" in parts.netloc:
            return url
        return urlunsplit(parts._replace(netloc=f"{REDIS_DEFAULT_USER}@{parts.netloc}"))

    def own_redis(self, directory: Path, port: int) -> ServerCommand:
        """Starts our own Redis, at `port` if it needs one. Raises ConfigError."""
        if self.tls_dir:
            return redis_socket_command(directory, self.redis_acl)
        return redis_command(directory, port, acl=self.redis_acl)

    def observer_nats(self, url: str) -> str:
        """The URL, or several with commas, by which people and their tools may listen to the
        broker."""
        login = credentials_of(self.key, ClusterRole.OBSERVER).nats
        return ",".join(with_login(server.strip(), login) for server in url.split(","))

    def observer_redis(self, url: str) -> str:
        """The URL by which people and their tools may read our own Redis."""
        return with_login(url, credentials_of(self.key, ClusterRole.OBSERVER).redis)


@dataclass(frozen=True, slots=True)
class OpenCluster:
    """No process has to show who it is. `credentials` are there for tools that always show
    them."""

    credentials: Mapping[ClusterRole, Path]
    nats_config: None = None
    ca: str = ""
    nats_scheme: str = "nats"

    def settings_of(self, role: str) -> Mapping[str, object]:
        """None: it has no credentials, whatever the environment has."""
        return {"credentials_file": "", "tls_dir": ""}

    async def watch_broker(self, renew: Callable[[], None]) -> None:
        """It has no certificate."""

    def access(self, role: ClusterRole) -> GrpcAccess:
        """No service asks who calls."""
        return OPEN_TO_ALL

    def foreign_redis(self, url: str) -> str:
        return url

    def own_redis(self, directory: Path, port: int) -> ServerCommand:
        return redis_command(directory, port)

    def observer_nats(self, url: str) -> str:
        return url

    def observer_redis(self, url: str) -> str:
        return url


ClusterLocks = LockedCluster | OpenCluster


def open_cluster(folder: Path, key: ClusterKey) -> OpenCluster:
    """Writes the credentials into a private folder."""
    return OpenCluster(write_all_credentials(folder, key))


def locked_cluster(
    folder: Path, key: ClusterKey, cluster: str, tls_dir: Path | None = None
) -> LockedCluster:
    """Writes all files of a locked cluster into a private folder. `tls_dir` has its certificates.

    Raises ConfigError for certificates that cannot be used.
    """
    certificate = None
    if tls_dir is not None:
        used = {name: TlsFolder(tls_dir, name) for name in (*ClusterRole, DOOR, NATS)}
        certificate = CertificateFiles(used[NATS].certificate, used[NATS].key)
    access = write_server_access(folder, key, cluster, certificate)
    credentials = write_all_credentials(folder, key)
    return LockedCluster(key, credentials, access.nats_config, access.redis_acl, tls_dir)


def nats_context(url: str, description: str, ca: str = "") -> str:
    """The content of a context file. `url` may be several with commas; the login in the first is
    that of all. `ca` is the file of their authorities, if they have TLS."""
    parts = [urlsplit(server.strip()) for server in url.split(",")]
    bare = [urlunsplit(part._replace(netloc=part.netloc.rpartition("@")[2])) for part in parts]
    user, password = unquote(parts[0].username or ""), unquote(parts[0].password or "")
    fields = {
        "description": description,
        "url": ",".join(bare),
        "user": user,
        "password": password,
        "inbox_prefix": inbox_of(user),
    }
    if ca:
        fields["ca"] = ca
    return json.dumps(fields, indent=1) + "\n"


def write_nats_context(folder: Path, url: str, description: str, ca: str = "") -> None:
    """Writes it into a private folder that is called `nats`, and selects it. Raises ConfigError."""
    contexts = private_folder(folder / "context")
    write_private_text(contexts / f"{CONTEXT_NAME}.json", nats_context(url, description, ca))
    write_private_text(folder / "context.txt", CONTEXT_NAME)
