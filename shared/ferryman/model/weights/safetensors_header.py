"""The header of a safetensors file: the place of each tensor, checked before any of it is read.

    8 bytes    length of the header, little-endian
    header     JSON: name → {"dtype", "shape", "data_offsets": [start, end)}
    buffer     the bytes of all tensors; offsets count from its start

A model folder comes from strangers. So the header has limits, and every number in it is compared
with the file: tensors fill the buffer without a gap or an overlap, and the bytes of each are those
of its dtype and shape. (Format: huggingface/safetensors, README.)
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ferryman.errors import ConfigError

MAX_HEADER_BYTES = 100_000_000
MAX_TENSORS = 1_000_000
MAX_AXES = 16

_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_BITS = {
    4: ("F4",),
    6: ("F6_E2M3", "F6_E3M2"),
    8: ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"),
    16: ("U16", "I16", "F16", "BF16"),
    32: ("U32", "I32", "F32"),
    64: ("U64", "I64", "F64", "C64"),
}
_BITS_OF = {dtype: bits for bits, dtypes in _BITS.items() for dtype in dtypes}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as its file's header describes it; `[start, end)` are byte offsets in the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start

    @property
    def places(self) -> tuple[StoredTensor, ...]:
        """The tensors of files whose bytes this one is made of: itself, unless a file has it in
        another form."""
        return (self,)


def read_header(file: Path, content: memoryview) -> tuple[StoredTensor, ...]:
    """All tensors of `file`, whose bytes are `content`, in the order of their bytes.

    Raises ConfigError, with the file's name and the tensor's, for a header that breaks the format
    or a limit, and for one that does not fit the file.
    """
    begin = _LENGTH_BYTES + _header_length(file, content)
    entries = _entries(file, bytes(content[_LENGTH_BYTES:begin]))
    tensors = [_stored(file, begin, name, entry) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end, tensor.name))
    _check_places(file, tensors, begin, len(content))
    return tuple(tensors)


def _header_length(file: Path, content: memoryview) -> int:
    length = int.from_bytes(content[:_LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise _refusal(file, f"its header has {length} bytes, more than {MAX_HEADER_BYTES}")
    if len(content) < _LENGTH_BYTES + length:
        raise _refusal(file, f"it ends after {len(content)} bytes, within its header")
    return length


def _entries(file: Path, header: bytes) -> dict[str, Any]:
    try:
        entries = json.loads(header, object_pairs_hook=_once_each)
    except (ValueError, RecursionError) as error:
        raise _refusal(file, f"its header is not JSON: {error}") from None
    if not isinstance(entries, dict):
        raise _refusal(file, "its header is not a JSON object")
    entries.pop(_METADATA, None)
    if len(entries) > MAX_TENSORS:
        raise _refusal(file, f"it has {len(entries)} tensors, more than {MAX_TENSORS}")
    return entries


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; of two values under one name, each reader would believe another."""
    members = dict(pairs)
    if len(members) != len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r} stands in it twice")
    return members


def _stored(file: Path, begin: int, name: str, entry: Any) -> StoredTensor:
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        are_whole = all(type(n) is int and n >= 0 for n in (*shape, start, end))
    except (TypeError, KeyError, ValueError):
        raise _refusal(file, f"tensor {name!r} lacks dtype, shape or data_offsets") from None
    if type(shape) is not list or len(shape) > MAX_AXES or not are_whole or end < start:
        raise _refusal(file, f"tensor {name!r} has an impossible shape or place")
    if type(dtype) is not str or dtype not in _BITS_OF:
        raise _refusal(file, f"tensor {name!r} has the unknown dtype {dtype!r}")
    if 8 * (end - start) != math.prod(shape) * _BITS_OF[dtype]:
        raise _refusal(
            file, f"tensor {name!r} has {end - start} bytes, but {shape} of {dtype} has others"
        )
    return StoredTensor(name, file, dtype, tuple(shape), begin + start, begin + end)


def _check_places(file: Path, ordered: list[StoredTensor], begin: int, num_bytes: int) -> None:
    """Raises ConfigError unless the tensors fill the file from `begin` on, byte for byte."""
    at = begin
    for tensor in ordered:
        if tensor.start < at:
            raise _refusal(file, f"tensor {tensor.name!r} overlaps the one before it")
        if tensor.start > at:
            raise _refusal(file, f"before tensor {tensor.name!r} are bytes of no tensor")
        at = tensor.end
    if at != num_bytes:
        raise _refusal(file, f"its tensors end at byte {at}, the file at {num_bytes}")


def _refusal(file: Path, why: str) -> ConfigError:
    return ConfigError(f"{file} is not a complete safetensors file: {why}")
