"""The files of credentials: one a role, in JSON, readable by their owner alone.

<folder>/ROLE.json    {"role", "nats": {"user", "password"}, "redis": {…}, "grpc_token",
                       "token_digests": {role: hex}, "order_keys": [hex, …], "signing_seed": hex}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ferryman.errors import ConfigError
from ferryman.security.cluster_key import ClusterKey
from ferryman.security.credentials import (
    NO_SEED,
    ClusterRole,
    Login,
    RoleCredentials,
    credentials_of,
)
from ferryman.security.key_file import cannot_write, private_draft, read_private_text
from ferryman.security.order_signatures import OrderSigner, OrderVerifier

MAX_FILE_BYTES = 16 << 10
PRIVATE, PRIVATE_FOLDER = 0o600, 0o700


def read_credentials(path: Path) -> RoleCredentials:
    """The credentials in a file. Raises ConfigError when it is missing, when other users may change
    it, or when it holds anything else; the message repeats nothing of the content."""
    text = read_private_text("credentials", path, MAX_FILE_BYTES)
    try:
        return _from_json(json.loads(text))
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ConfigError(
            f"credentials {path}: they are not what `ferryman` of this version writes;"
            " `ferryman credentials` writes them anew from the cluster's key"
        ) from None


def write_credentials(path: Path, credentials: RoleCredentials) -> None:
    """Writes them so that a reader sees the old file or the new one. Raises ConfigError."""
    write_private_text(path, json.dumps(asdict(credentials), indent=1) + "\n")


def write_all_credentials(folder: Path, key: ClusterKey) -> Mapping[ClusterRole, Path]:
    """Writes the file of every role into an existing folder; returns their paths."""
    paths = {role: folder / f"{role.value}.json" for role in ClusterRole}
    for role, path in paths.items():
        write_credentials(path, credentials_of(key, role))
    return paths


def private_folder(path: Path) -> Path:
    """The folder, made for its owner alone if it is missing. Raises ConfigError."""
    try:
        path.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(str(path), error) from None
    return path


def write_private_text(path: Path, text: str, mode: int = PRIVATE) -> None:
    """Replaces a file as a whole by one with this text and mode. Raises ConfigError."""
    try:
        with private_draft(path, text, mode) as draft:
            draft.replace(path)
    except OSError as error:
        raise cannot_write(str(path), error) from None


def _from_json(raw: Mapping[str, Any]) -> RoleCredentials:
    digests = {ClusterRole(role): _text(digest) for role, digest in raw["token_digests"].items()}
    if set(digests) != set(ClusterRole):
        raise ValueError("a digest for every role")
    return RoleCredentials(
        role=ClusterRole(raw["role"]),
        nats=_login(raw["nats"]),
        redis=_login(raw["redis"]),
        grpc_token=_text(raw["grpc_token"]),
        token_digests=digests,
        order_keys=_public_keys(raw["order_keys"]),
        signing_seed=_seed(raw["signing_seed"]),
    )


def _login(raw: Mapping[str, Any]) -> Login:
    return Login(_text(raw["user"]), _text(raw["password"]))


def _public_keys(raw: object) -> tuple[str, ...]:
    if not isinstance(raw, list) or not raw:
        raise ValueError("a list of keys that is not empty")
    keys = tuple(map(_text, raw))
    OrderVerifier(keys)
    return keys


def _seed(raw: object) -> str:
    if raw != NO_SEED:
        OrderSigner(_text(raw))
    return str(raw)


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.isascii() or not value:
        raise ValueError("a text that is not empty")
    return value
