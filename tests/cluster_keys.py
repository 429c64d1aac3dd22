"""The cluster key that tests use, and the files that processes read it from."""

from __future__ import annotations

from pathlib import Path

from ferryman.security.cluster_key import ClusterKey, Purpose
from ferryman.security.credentials import ClusterRole, credentials_of

KEY = ClusterKey(bytes(range(32)))
STRANGERS_KEY = ClusterKey(bytes(range(1, 33)))
STORED, STRANGERS_STORED = (key.subkey(Purpose.STORED_UNIT) for key in (KEY, STRANGERS_KEY))


def token_of(role: ClusterRole, key: ClusterKey = KEY) -> str:
    """The gRPC token of a role."""
    return credentials_of(key, role).grpc_token


def key_file_in(folder: Path, key: ClusterKey = KEY) -> Path:
    """A file with a key that only its owner may read."""
    path = folder / "cluster.key"
    path.touch(0o600)
    path.write_text(key.text)
    return path
