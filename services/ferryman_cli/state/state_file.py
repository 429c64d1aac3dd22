"""The format of a state file: safetensors, with what is signed in its metadata.

    8 bytes       length of the header, always HEADER_BYTES
    header        JSON, padded with spaces: tensors by name; the statement and its signature
    tokens        U32 [tokens]
    full …        U8 [units, bytes of a unit], for each kind of state that the model has
    digests       U8 [units of all kinds, 32]

A file is written under another name until it is whole, and is read in pieces: neither way is it in
memory as a whole. docs/state-files.md has the table of its fields.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any

from ferryman.errors import ConfigError, CorruptState, InvalidRequest
from ferryman.security.state_signatures import is_state_signed
from ferryman.wire.codec.state_statement import (
    DIGEST_BYTES,
    PIECE_BYTES,
    StateStatement,
    content_digest,
    statement_from_json,
)
from ferryman.wire.public import SignedState

FORMAT = "ferryman.state"
HEADER_BYTES = (32 << 10) - 8
SIGNATURE_BYTES = 64


def _header(signed: SignedState, statement: StateStatement) -> bytes:
    """The header of a file, HEADER_BYTES long."""
    metadata = {
        "format": FORMAT,
        "statement": signed.statement,
        "signature": signed.signature.hex(),
    }
    fields = {"__metadata__": metadata, **_tensors(statement)}
    text = json.dumps(fields, separators=(",", ":")).encode()
    assert len(text) <= HEADER_BYTES, "a statement within its bounds fits the header"
    return HEADER_BYTES.to_bytes(8, "little") + text.ljust(HEADER_BYTES)


def _tensors(statement: StateStatement) -> dict[str, Any]:
    """The tensors of a file, without gaps and in the order of their bytes."""
    shapes = {"tokens": ("U32", [statement.num_tokens], 4 * statement.num_tokens)}
    for kind, num_bytes in statement.unit_bytes.items():
        count = statement.count(kind)
        shapes[kind.value] = ("U8", [count, num_bytes], count * num_bytes)
    rows = statement.num_units
    shapes["digests"] = ("U8", [rows, DIGEST_BYTES], rows * DIGEST_BYTES)
    tensors, at = dict[str, Any](), 0
    for name, (dtype, shape, size) in shapes.items():
        tensors[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    return tensors


# Writing.


class StateFileWriter:
    """A file that has no name yet: the bytes in their order, then what is signed about them."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path, self._file = path, file
        self._num_bytes = 0
        file.seek(8 + HEADER_BYTES)

    def add(self, data: bytes) -> None:
        self._file.write(data)
        self._num_bytes += len(data)

    def finish(self, signed: SignedState) -> StateStatement:
        """Writes the rest, and gives the file its name. Raises CorruptState for other bytes than
        the statement has, ConfigError for a name that is taken."""
        statement = statement_from_json(signed.statement)
        if self._num_bytes != statement.num_bytes:
            raise CorruptState(f"{statement.num_bytes} bytes were said, {self._num_bytes} came")
        self._file.write(signed.unit_digests)
        self._file.seek(0)
        self._file.write(_header(signed, statement))
        self._file.flush()
        os.fsync(self._file.fileno())
        os.link(self._file.name, self._path)
        return statement


@contextmanager
def written_state_file(path: Path) -> Iterator[StateFileWriter]:
    """A new file, which only this user may read. Nothing of it is left after an error.

    Raises ConfigError if there is a file of that name, or it cannot be written.
    """
    if path.exists() or path.is_symlink():
        raise ConfigError(f"{path} exists already; name another file")
    try:
        with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            try:
                yield StateFileWriter(path, file)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(file.name)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None


# Reading.


@dataclass(frozen=True, slots=True)
class StateFile:
    """An open file whose header, statement and size agree."""

    path: Path
    statement: StateStatement
    signed: SignedState
    _file: IO[bytes]

    @property
    def num_bytes(self) -> int:
        """The size of the file."""
        return 8 + HEADER_BYTES + self.statement.num_bytes + len(self.signed.unit_digests)

    def pieces(self) -> Iterator[bytes]:
        """Token ids and units, in pieces. Raises CorruptState if the file was cut meanwhile."""
        self._file.seek(8 + HEADER_BYTES)
        left = self.statement.num_bytes
        while left:
            piece = self._file.read(min(left, PIECE_BYTES))
            if not piece:
                raise CorruptState(f"{self.path}: it was cut while it was read")
            left -= len(piece)
            yield piece

    def check(self) -> None:
        """Raises CorruptState unless signature and all digests fit."""
        statement, signed = self.statement, self.signed
        if not is_state_signed(statement.signer, signed.signature, signed.statement):
            raise CorruptState(f"{self.path}: its statement was changed after it had been signed")
        if content_digest(signed.unit_digests).hex() != statement.units_digest:
            raise CorruptState(f"{self.path}: the digests of its units are not those signed")
        self._file.seek(8 + HEADER_BYTES)
        if self._digest(4 * statement.num_tokens).hex() != statement.tokens_digest:
            raise CorruptState(f"{self.path}: its token ids are not those signed")
        for index, (kind, page) in enumerate(statement.names):
            wanted = signed.unit_digests[index * DIGEST_BYTES :][:DIGEST_BYTES]
            if self._digest(statement.unit_bytes[kind]) != wanted:
                raise CorruptState(f"{self.path}: the {kind} unit of page {page} is damaged")

    def _digest(self, num_bytes: int) -> bytes:
        """The digest of the next bytes."""
        digest = blake2b(digest_size=DIGEST_BYTES)
        while num_bytes and (piece := self._file.read(min(num_bytes, PIECE_BYTES))):
            digest.update(piece)
            num_bytes -= len(piece)
        return digest.digest()


@contextmanager
def opened_state_file(path: Path) -> Iterator[StateFile]:
    """A file to be read. Raises ConfigError if it cannot be opened, or is a link or no file, and
    InvalidRequest if it is no state file, or was cut."""
    try:
        # A link may lead to a file that others change, a pipe has no end.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        is_link = path.is_symlink()
        reason = "it is a link; name the file itself" if is_link else error.strerror
        raise ConfigError(f"{path}: {reason}") from None
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise ConfigError(f"{path}: it is no file")
    with open(fd, "rb") as file:
        yield _read(path, file, status.st_size)


def _read(path: Path, file: IO[bytes], size: int) -> StateFile:
    head = file.read(8 + HEADER_BYTES)
    if len(head) < 8 + HEADER_BYTES or int.from_bytes(head[:8], "little") != HEADER_BYTES:
        raise _no_state(path, "its header is not one")
    fields = _fields(path, head[8:])
    metadata = fields.pop("__metadata__", None)
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise _no_state(path, f"its metadata has no format {FORMAT}")
    statement = statement_from_json(str(metadata.get("statement", "")))
    if fields != _tensors(statement):
        raise _no_state(path, "its tensors are not those of its statement")
    digests_bytes = DIGEST_BYTES * statement.num_units
    wanted = 8 + HEADER_BYTES + statement.num_bytes + digests_bytes
    if size != wanted:
        raise _no_state(path, f"it should have {wanted} bytes and has {size}")
    file.seek(wanted - digests_bytes)
    signed = SignedState(
        str(metadata["statement"]), _signature(path, metadata), file.read(digests_bytes)
    )
    return StateFile(path, statement, signed, file)


def _fields(path: Path, header: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(header)
    except (ValueError, RecursionError):
        raise _no_state(path, "its header is no JSON") from None
    if not isinstance(fields, dict):
        raise _no_state(path, "its header is no JSON object")
    return fields


def _signature(path: Path, metadata: Mapping[str, Any]) -> bytes:
    try:
        signature = bytes.fromhex(metadata["signature"])
    except (KeyError, TypeError, ValueError):
        raise _no_state(path, "it has no signature") from None
    if len(signature) != SIGNATURE_BYTES:
        raise _no_state(path, f"its signature has {len(signature)} bytes")
    return signature


def _no_state(path: Path, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{path} is no state file: {reason}", "file")
