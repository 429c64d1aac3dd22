"""The role that a process proves to others of its cluster, and who may read its metrics.

Settings name files of secrets; `ferryman.security`, which reads them, knows no settings.

Metrics are numbers, but they show how large a cluster is, how busy, and what fails in it. In a
locked cluster tools for them show an observer's token with every scrape (`authorization: Bearer …`,
RFC 6750, 2.1). Health stays open: container engines ask for it, and it shows no more than whether
the process serves.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ferryman.errors import ConfigError, FerrymanError, PermissionDenied, Unauthenticated
from ferryman.runtime.metrics import Metrics
from ferryman.security.credentials import ClusterRole, RoleCredentials
from ferryman.security.credentials_file import read_credentials
from ferryman.security.tls_folder import TlsFolder
from ferryman.settings.groups import AccessSettings
from ferryman.wire.grpc.role_tokens import GrpcAccess

log = logging.getLogger(__name__)

SCHEME = "bearer"
NO_TOKEN = "metrics are for those who show the observer's token; see metrics.token"


def access_of(settings: AccessSettings, role: str) -> GrpcAccess:
    """The proof of its role that a process has. Raises ConfigError for a file of another role."""
    return GrpcAccess(given_credentials(settings, role), given_tls(settings, role))


def given_credentials(access: AccessSettings, role: str) -> RoleCredentials | None:
    """The credentials of a process with this role; None in an open cluster.

    Raises ConfigError like `read_credentials`, and for a file of another role.
    """
    if not access.credentials_file:
        log.warning("no CREDENTIALS_FILE: this process obeys anybody who reaches its ports")
        return None
    credentials = read_credentials(Path(access.credentials_file))
    if credentials.role != role:
        raise ConfigError(
            f"credentials {access.credentials_file}: they are those of {credentials.role},"
            f" and this is a {role}"
        )
    return credentials


def given_tls(access: AccessSettings, name: str) -> TlsFolder | None:
    """The certificate of `name` for a process with these settings; None without TLS.

    Raises ConfigError like `TlsFolder`, and without credentials: a certificate alone names a role
    that no one would check.
    """
    if not access.tls_dir:
        return None
    if not access.credentials_file:
        raise ConfigError(
            "TLS_DIR: it needs CREDENTIALS_FILE, too; `ferryman credentials` makes one"
        )
    return TlsFolder(Path(access.tls_dir), name)


@dataclass(frozen=True, slots=True)
class MetricsAccess:
    """Decides who may read metrics. Without `credentials` everybody may."""

    credentials: RoleCredentials | None

    def refusal(self, authorizations: Sequence[str]) -> FerrymanError | None:
        """The error for a reader with these `authorization` headers, if it may not read. Two
        headers are as bad as none."""
        if self.credentials is None:
            return None
        role = self._role(authorizations)
        if role is None:
            return Unauthenticated(NO_TOKEN)
        if role is not ClusterRole.OBSERVER:
            return PermissionDenied(f"a process of role {role} may not read metrics")
        return None

    def is_observer(self, authorizations: Sequence[str]) -> bool:
        """Whether these headers show the observer's token. An open cluster has none."""
        return self._role(authorizations) is ClusterRole.OBSERVER

    def _role(self, authorizations: Sequence[str]) -> ClusterRole | None:
        if self.credentials is None:
            return None
        scheme, _, token = (authorizations[0] if len(authorizations) == 1 else "").partition(" ")
        return self.credentials.role_of(token.strip()) if scheme.lower() == SCHEME else None


class MetricsGuard:
    """Asks readers, and counts those that it refuses in `refused_reads_total`."""

    def __init__(self, access: MetricsAccess, metrics: Metrics) -> None:
        self._access = access
        text = "Reads of metrics and ledgers refused."
        self._refused = metrics.counter("refused_reads", text, ["path", "reason"])

    def may_read(self, authorizations: Sequence[str]) -> bool:
        """Whether these headers suffice, for an answer with more details."""
        return self._access.refusal(authorizations) is None

    def is_observer(self, authorizations: Sequence[str]) -> bool:
        """Whether these headers show the observer's token, who may see requests of all tenants."""
        return self._access.is_observer(authorizations)

    def check(self, path: str, authorizations: Sequence[str]) -> None:
        """Raises Unauthenticated or PermissionDenied; `path` is one that this process serves."""
        error = self._access.refusal(authorizations)
        if error is not None:
            self._refused.labels(path, error.reason).inc()
            raise error
