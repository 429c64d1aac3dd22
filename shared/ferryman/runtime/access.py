"""A process proves its role to others of its cluster: from its settings to files of secrets.

The files themselves are in `ferryman.security`, which knows no settings.
"""

from __future__ import annotations

import logging
from pathlib import Path

from ferryman.errors import ConfigError
from ferryman.security.credentials import RoleCredentials
from ferryman.security.credentials_file import read_credentials
from ferryman.security.tls_folder import TlsFolder
from ferryman.settings.groups import AccessSettings
from ferryman.wire.grpc.role_tokens import GrpcAccess

log = logging.getLogger(__name__)


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
