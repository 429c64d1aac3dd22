"""The file of the cluster key: made once, read by each service that needs it."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ferryman.errors import ConfigError
from ferryman.security.cluster_key import SECRET_BYTES, ClusterKey, cluster_key_from_text

log = logging.getLogger(__name__)

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
OTHERS_READ = stat.S_IRGRP | stat.S_IROTH
MAX_FILE_BYTES = 4096
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


def read_key_file(path: Path) -> ClusterKey:
    """The key. Raises ConfigError when the file is missing, or when other users may change it."""
    text = read_private_text("cluster key", path, MAX_FILE_BYTES, "`ferryman key FILE` makes one")
    try:
        return cluster_key_from_text(text)
    except ConfigError as error:
        raise ConfigError(f"cluster key {path}: {error}") from None


def read_private_text(what: str, path: Path, max_bytes: int, hint: str = "") -> str:
    """The text of a file with secrets; `what` and `hint` are words of its errors.

    Raises ConfigError when the file is missing, or when other users may change it. A file that
    other users may read only causes a warning: secrets of containers are mounted so.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        more = f"; {hint}" if hint and isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"{what} {path}: {error.strerror}{more}") from None
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{what} {path}: it is no file")
        text = os.read(fd, max_bytes).decode("ascii", errors="replace")
    finally:
        os.close(fd)
    if mode & OTHERS_WRITE:
        raise ConfigError(f"{what} {path}: others may write to it; chmod 600 {path}")
    if mode & OTHERS_READ:
        log.warning("%s %s: others on this machine may read it; chmod 600 it", what, path)
    return text


def make_key_file(path: Path) -> None:
    """Writes a new random key to a file that only this user may read, unless the file exists.

    If several processes do this at the same time, one wins and all read the same key. Raises
    ConfigError if the file cannot be made.
    """
    if not path.exists():
        _keep(path, ClusterKey(secrets.token_bytes(SECRET_BYTES)))


def take_key(path: Path, key: ClusterKey) -> None:
    """Writes a key that the operator chose, unless the file has it already.

    Raises ConfigError if the file has another key: what is stored under that one would be lost.
    """
    if not path.exists():
        _keep(path, key)
    if read_key_file(path) != key:
        raise ConfigError(
            f"cluster key {path}: it is not the one that was given; remove the old one first, and"
            " what is stored under it is lost"
        )


def _keep(path: Path, key: ClusterKey) -> None:
    try:
        with private_draft(path, key.text + "\n", is_synced=True) as draft:
            with suppress(FileExistsError):
                os.link(draft, path)
    except OSError as error:
        raise cannot_write(f"cluster key {path}", error) from None


@contextmanager
def private_draft(
    path: Path, text: str, mode: int = 0o600, *, is_synced: bool = False
) -> Iterator[Path]:
    """A file with this text and mode beside `path`, to be put in its place within a block: so no
    reader ever sees half of it. Nothing of it is left behind. Raises OSError."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(fd, "w") as file:
            file.write(text)
            file.flush()
            if is_synced:
                os.fsync(fd)
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def cannot_write(what: str, error: OSError) -> ConfigError:
    """The error for a file or folder that cannot be written; if its disk is full, it says what to
    do."""
    remedy = "; make room there, or choose another folder" if error.errno in FULL_DISK else ""
    return ConfigError(f"{what}: {error.strerror}{remedy}")
