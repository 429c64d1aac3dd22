"""GGUF files for tests, written from the specification with nothing of the reader."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ALIGNMENT = 32

Value = str | bool | int | float | Sequence[str] | Sequence[bool] | Sequence[int] | Sequence[float]


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    """A tensor with ggml's number of its type. `shape` has the outermost axis first."""

    name: str
    type_number: int
    shape: tuple[int, ...]
    content: bytes


def floats(name: str, values: np.ndarray) -> WrittenTensor:
    """A tensor in float32."""
    return WrittenTensor(name, 0, values.shape, values.astype("<f4").tobytes())


def q8_0(name: str, values: np.ndarray) -> WrittenTensor:
    """A tensor in blocks of 32: the largest number of a block is 127 steps."""
    blocks = values.reshape(-1, 32).astype(np.float32)
    step = np.abs(blocks).max(axis=1, keepdims=True) / 127
    codes = np.round(blocks / np.where(step > 0, step, 1)).astype(np.int8)
    content = np.concatenate([step.astype("<f2").view(np.uint8), codes.view(np.uint8)], axis=1)
    return WrittenTensor(name, 8, values.shape, content.tobytes())


def file_bytes(metadata: Mapping[str, Value], tensors: Sequence[WrittenTensor] = ()) -> bytes:
    """A whole file of version 3."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for name, value in metadata.items():
        head += _text(name) + _typed(value)
    contents = b""
    for tensor in tensors:
        sizes = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
        place = struct.pack("<IQ", tensor.type_number, len(contents))
        head += _text(tensor.name) + sizes + place
        contents += _padded(tensor.content)
    return _padded(head) + contents


def write(path: Path, metadata: Mapping[str, Value], tensors: Sequence[WrittenTensor] = ()) -> Path:
    path.write_bytes(file_bytes(metadata, tensors))
    return path


def _typed(value: Value) -> bytes:
    """The number of a value's type and its bytes."""
    match value:
        case str():
            return struct.pack("<I", 8) + _text(value)
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(_text(str(v)) for v in value)
    number, code = {bool: (7, "?"), int: (5, "i"), float: (6, "f")}[type(next(iter(value), 0))]
    return struct.pack(f"<IIQ{len(value)}{code}", 9, number, len(value), *value)


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % ALIGNMENT)
