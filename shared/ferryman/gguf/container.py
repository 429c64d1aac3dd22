"""The head of a GGUF file: its metadata and the place of each tensor, checked before they are used.

    "GGUF" | version | number of tensors | number of keys | keys and values | headers | contents

All numbers are little-endian. A text is its length (uint64) and UTF-8; a value is the number of its
type and its bytes; an array is its element type, its length and its elements. Contents begin at the
next multiple of `general.alignment`, and offsets of tensors count from there.

A file comes from strangers. So everything has a limit, and every number is compared with the file
before it is used. (Format: ggml-org/ggml, docs/gguf.md, versions 2 and 3.)
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ferryman.errors import ConfigError
from ferryman.gguf.tensor_types import TENSOR_TYPES, TensorType, refused_type

MAGIC = b"GGUF"
_LFS = b"version https://git-lfs"
VERSIONS = (2, 3)
MAX_TENSORS = 1_000_000
MAX_KEYS = 100_000
MAX_NAME_BYTES = 65_535
MAX_AXES = 4
DEFAULT_ALIGNMENT = 32
ALIGNMENT_KEY = "general.alignment"

FLOAT32 = 6
UINT64, INT64 = 10, 11
"""The format's number of the type of a key's value that has 32 bits."""
_STRING, _ARRAY, _BOOL = 8, 9, 7
# The codes of `struct` for numbers, by the format's numbers of its types.
_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    FLOAT32: "f",
    _BOOL: "?",
    UINT64: "Q",
    INT64: "q",
    12: "d",
}
_LENGTH = struct.Struct("<Q")


class HeadCut(ConfigError):
    """The bytes end within the head."""


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array of the metadata, whose place was checked; its elements are read by `elements` and
    begin at the byte `start` of the file."""

    type_number: int
    count: int
    content: memoryview
    start: int

    def elements(self) -> list[int] | list[float] | list[bool] | list[str]:
        """All elements. Raises UnicodeDecodeError for a text that is none."""
        if self.type_number != _STRING:
            return list(struct.unpack(f"<{self.count}{_NUMBERS[self.type_number]}", self.content))
        texts, content, at = [], bytes(self.content), 0
        for _ in range(self.count):
            begin = at + _LENGTH.size
            at = begin + _LENGTH.unpack_from(content, at)[0]
            texts.append(content[begin:at].decode())
        return texts


MetadataValue = str | bool | int | float | StoredArray


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A tensor under llama.cpp's name. `shape` has the outermost axis first, as torch has it;
    `[start, end)` are byte offsets in `file`."""

    name: str
    file: Path
    kind: TensorType
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class GgufHead:
    """The metadata and the headers of the tensors of a file."""

    file: Path
    metadata: Mapping[str, MetadataValue]
    tensors: tuple[TensorHeader, ...]


def read_head(file: Path, content: memoryview, num_bytes: int) -> GgufHead:
    """The head of `file`, which has `num_bytes`; `content` are these, or the first of them.

    Raises ConfigError, naming the file and the key or tensor, for a head that breaks the format or
    a limit, that does not fit the file, or that has a type of tensor which is not read; HeadCut
    where `content` ends within it.
    """
    cursor = _Cursor(file, content, num_bytes)
    num_tensors, num_keys = _counts(cursor)
    metadata: dict[str, MetadataValue] = {}
    for _ in range(num_keys):
        name = cursor.name("a key")
        if name in metadata:
            raise cursor.refusal(f"key {name!r} stands in it twice")
        metadata[name] = cursor.value(name)
    sizes = [_tensor_sizes(cursor) for _ in range(num_tensors)]
    alignment = _alignment(cursor, metadata)
    begin = -(-cursor.at // alignment) * alignment
    tensors = tuple(_placed(cursor, size, begin, alignment) for size in sizes)
    _check_places(cursor, tensors)
    return GgufHead(file, metadata, tensors)


@dataclass(slots=True)
class _Cursor:
    """Reads a file from its start; every read is checked against its end."""

    file: Path
    content: memoryview
    num_bytes: int
    at: int = 0

    def cut(self, what: str) -> HeadCut:
        end = f"it ends after {len(self.content)} bytes, within {what}; complete the download"
        return HeadCut(str(self.refusal(end)))

    def refusal(self, why: str) -> ConfigError:
        return ConfigError(f"{self.file} is not a complete GGUF file: {why}")

    def take(self, num_bytes: int, what: str) -> memoryview:
        end = self.at + num_bytes
        if end > len(self.content):
            raise self.cut(what)
        part = self.content[self.at : end]
        self.at = end
        return part

    def number(self, code: str, what: str) -> int:
        (value,) = struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), what))
        return int(value)

    def name(self, what: str) -> str:
        length = self.number("Q", what)
        if length > MAX_NAME_BYTES:
            raise self.refusal(f"{what} has {length} bytes, more than {MAX_NAME_BYTES}")
        return self._decoded(self.take(length, what), what)

    def value(self, name: str) -> MetadataValue:
        what = f"the value of {name!r}"
        type_number = self.number("I", what)
        if type_number == _STRING:
            return self._decoded(self.take(self.number("Q", what), what), what)
        if type_number == _ARRAY:
            return self._array(name, what)
        code = self._code(type_number, name)
        (value,) = struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), what))
        return value  # type: ignore[no-any-return]

    def _array(self, name: str, what: str) -> StoredArray:
        type_number, count = self.number("I", what), self.number("Q", what)
        start = self.at
        if type_number == _STRING:
            self._skip_texts(count, what)
        else:
            self.take(count * struct.calcsize(f"<{self._code(type_number, name)}"), what)
        return StoredArray(type_number, count, self.content[start : self.at], start)

    def _skip_texts(self, count: int, what: str) -> None:
        at, last = self.at, len(self.content) - _LENGTH.size
        for _ in range(count):
            if at > last:
                raise self.cut(what)
            at += _LENGTH.size + _LENGTH.unpack_from(self.content, at)[0]
        if at > len(self.content):
            raise self.cut(what)
        self.at = at

    def _code(self, type_number: int, name: str) -> str:
        if type_number not in _NUMBERS:
            raise self.refusal(f"the value of {name!r} has the unknown type {type_number}")
        return _NUMBERS[type_number]

    def _decoded(self, text: memoryview, what: str) -> str:
        try:
            return bytes(text).decode()
        except UnicodeDecodeError:
            raise self.refusal(f"{what} is not UTF-8") from None


@dataclass(frozen=True, slots=True)
class _TensorSizes:
    """The header of a tensor as it is stored; `offset` counts from the start of the contents."""

    name: str
    kind: TensorType
    shape: tuple[int, ...]
    offset: int


def _counts(cursor: _Cursor) -> tuple[int, int]:
    """The numbers of tensors and of keys."""
    if bytes(cursor.content[: len(_LFS)]) == _LFS:
        raise cursor.refusal("it is a pointer of Git LFS; fetch the file with `git lfs pull`")
    if bytes(cursor.take(len(MAGIC), "its first word")) != MAGIC:
        raise cursor.refusal("it does not begin with GGUF; name another, or download it again")
    version = cursor.number("I", "its version")
    if version not in VERSIONS:
        is_swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        why = "it is big-endian" if is_swapped else f"it has version {version}"
        raise cursor.refusal(f"{why}; little-endian versions 2 and 3 are read")
    num_tensors, num_keys = cursor.number("Q", "its counts"), cursor.number("Q", "its counts")
    for count, most, what in ((num_tensors, MAX_TENSORS, "tensors"), (num_keys, MAX_KEYS, "keys")):
        if count > most:
            raise cursor.refusal(f"it has {count} {what}, more than {most}")
    return num_tensors, num_keys


def _alignment(cursor: _Cursor, metadata: Mapping[str, MetadataValue]) -> int:
    alignment = metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 8 or alignment % 8:
        raise cursor.refusal(f"{ALIGNMENT_KEY} is {alignment!r}, not a multiple of 8")
    return alignment


def _tensor_sizes(cursor: _Cursor) -> _TensorSizes:
    name = cursor.name("a tensor's name")
    what = f"the header of tensor {name!r}"
    num_axes = cursor.number("I", what)
    if not 1 <= num_axes <= MAX_AXES:
        raise cursor.refusal(f"tensor {name!r} has {num_axes} axes; 1 to {MAX_AXES} are possible")
    sizes = [cursor.number("Q", what) for _ in range(num_axes)]
    number = cursor.number("I", what)
    if number not in TENSOR_TYPES:
        readable = ", ".join(kind.name for kind in TENSOR_TYPES.values())
        raise ConfigError(
            f"{cursor.file}: tensor {name!r} has {refused_type(number)} (read are {readable})"
        )
    kind = TENSOR_TYPES[number]
    if not all(sizes) or sizes[0] % kind.block_len:
        raise cursor.refusal(
            f"tensor {name!r} has the impossible shape {sizes[::-1]} for {kind.name}, whose rows "
            f"are multiples of {kind.block_len}"
        )
    return _TensorSizes(name, kind, tuple(reversed(sizes)), cursor.number("Q", what))


def _placed(cursor: _Cursor, sizes: _TensorSizes, begin: int, alignment: int) -> TensorHeader:
    if sizes.offset % alignment:
        raise cursor.refusal(f"tensor {sizes.name!r} does not begin at a multiple of {alignment}")
    kind, start = sizes.kind, begin + sizes.offset
    end = start + math.prod(sizes.shape) // kind.block_len * kind.block_bytes
    if end > cursor.num_bytes:
        raise cursor.refusal(
            f"tensor {sizes.name!r} ends at byte {end}, the file at {cursor.num_bytes}; "
            "complete the download"
        )
    return TensorHeader(sizes.name, cursor.file, kind, sizes.shape, start, end)


def _check_places(cursor: _Cursor, tensors: tuple[TensorHeader, ...]) -> None:
    """Raises ConfigError for two tensors of one name, or over the same bytes."""
    names: set[str] = set()
    at = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.start):
        if tensor.name in names:
            raise cursor.refusal(f"tensor {tensor.name!r} stands in it twice")
        if tensor.start < at:
            raise cursor.refusal(f"tensor {tensor.name!r} overlaps the one before it")
        names.add(tensor.name)
        at = tensor.end
