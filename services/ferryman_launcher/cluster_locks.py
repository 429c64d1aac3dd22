"""The locks of a cluster: which files its servers and services get, and observers' URLs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ferryman.cluster_key import ClusterKey
from ferryman.credentials import ClusterRole, credentials_of
from ferryman.runtime.credentials_file import write_all_credentials
from ferryman.runtime.server_access import with_login, write_server_access

REDIS_DEFAULT_USER = "default"


@dataclass(frozen=True, slots=True)
class LockedCluster:
    """Every process shows who it is. `credentials` are the files of services by role."""

    key: ClusterKey
    credentials: Mapping[ClusterRole, Path]
    nats_config: Path
    redis_acl: Path

    def settings_of(self, role: str) -> Mapping[str, object]:
        """The settings by which a service of this role finds its credentials."""
        return {"credentials_file": self.credentials[ClusterRole(role)]}

    def foreign_redis(self, url: str) -> str:
        """The URL for services of a Redis that others run, which knows none of our users: its
        default user, unless the URL names one."""
        scheme, _, rest = url.partition("://")
        return url if "@" in rest else f"{scheme}://{REDIS_DEFAULT_USER}@{rest}"

    def observer_nats(self, url: str) -> str:
        """The URL, or several with commas, by which people and their tools may hear the broker."""
        login = credentials_of(self.key, ClusterRole.OBSERVER).nats
        return ",".join(with_login(one.strip(), login) for one in url.split(","))

    def observer_redis(self, url: str) -> str:
        """The URL by which people and their tools may read our own Redis."""
        return with_login(url, credentials_of(self.key, ClusterRole.OBSERVER).redis)


@dataclass(frozen=True, slots=True)
class OpenCluster:
    """Nobody is asked who it is. `credentials` are there for tools that show them everywhere."""

    credentials: Mapping[ClusterRole, Path]
    nats_config: None = None
    redis_acl: None = None

    def settings_of(self, role: str) -> Mapping[str, object]:
        """None: it has no credentials, whatever the environment says."""
        return {"credentials_file": ""}

    def foreign_redis(self, url: str) -> str:
        return url

    def observer_nats(self, url: str) -> str:
        return url

    def observer_redis(self, url: str) -> str:
        return url


ClusterLocks = LockedCluster | OpenCluster


def open_cluster(folder: Path, key: ClusterKey) -> OpenCluster:
    """Writes the credentials into a private folder."""
    return OpenCluster(write_all_credentials(folder, key))


def locked_cluster(folder: Path, key: ClusterKey, cluster: str) -> LockedCluster:
    """Writes all files of a locked cluster into a private folder."""
    access = write_server_access(folder, key, cluster)
    credentials = write_all_credentials(folder, key)
    return LockedCluster(key, credentials, access.nats_config, access.redis_acl)
