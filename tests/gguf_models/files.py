"""GGUF files for tests: any settings, and tensors of any type as their bytes. Nothing of the reader
writes them."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tools.bench.gguf.container import (
    ALIGNMENT,
    Setting,
    quantise_q8_0,
    setting_bytes,
    text_bytes,
)


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
    content = quantise_q8_0(torch.tensor(values)).numpy()
    return WrittenTensor(name, 8, values.shape, content.tobytes())


def wide_array(numbers: Sequence[int]) -> bytes:
    """The value of a key: whole numbers of 64 bits without a sign, which a converter writes where
    32 are too few."""
    return struct.pack(f"<IIQ{len(numbers)}Q", 9, 10, len(numbers), *numbers)


def file_bytes(
    metadata: Mapping[str, Setting | bytes], tensors: Sequence[WrittenTensor] = ()
) -> bytes:
    """A whole file of version 3."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for name, value in metadata.items():
        head += text_bytes(name) + (value if isinstance(value, bytes) else setting_bytes(value))
    contents = b""
    for tensor in tensors:
        sizes = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
        place = struct.pack("<IQ", tensor.type_number, len(contents))
        head += text_bytes(tensor.name) + sizes + place
        contents += _padded(tensor.content)
    return _padded(head) + contents


def write(
    path: Path, metadata: Mapping[str, Setting | bytes], tensors: Sequence[WrittenTensor] = ()
) -> Path:
    path.write_bytes(file_bytes(metadata, tensors))
    return path


def _padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % ALIGNMENT)
