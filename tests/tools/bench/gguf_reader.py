"""A second reading of the GGUF specification, to check what the writer wrote."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NUMBERS = {4: "I", 5: "i", 6: "f", 7: "?"}
ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class ReadTensor:
    """A header, and a view of the bytes from its offset on. `sizes` begins with the innermost
    axis."""

    sizes: tuple[int, ...]
    kind: int
    content: memoryview


class GgufReader:
    """Reads one file from its start."""

    def __init__(self, path: Path) -> None:
        self._content, self._at = path.read_bytes(), 0

    def read(self) -> tuple[dict[str, Any], dict[str, ReadTensor]]:
        """The settings and the tensors."""
        assert self._take("4s") == b"GGUF"
        assert self._take("I") == 3
        num_tensors, num_settings = self._take("Q"), self._take("Q")
        settings = {self._text(): self._value(self._take("I")) for _ in range(num_settings)}
        headers = {self._text(): self._header() for _ in range(num_tensors)}
        start = -(-self._at // ALIGNMENT) * ALIGNMENT
        tensors = {
            name: ReadTensor(sizes, kind, memoryview(self._content)[start + offset :])
            for name, (sizes, kind, offset) in headers.items()
        }
        return settings, tensors

    def _header(self) -> tuple[tuple[int, ...], int, int]:
        sizes = tuple(self._take("Q") for _ in range(self._take("I")))
        return sizes, self._take("I"), self._take("Q")

    def _value(self, kind: int) -> Any:
        if kind == 8:
            return self._text()
        if kind == 9:
            inner, count = self._take("I"), self._take("Q")
            return [self._value(inner) for _ in range(count)]
        return self._take(NUMBERS[kind])

    def _text(self) -> str:
        return bytes(self._take(f"{self._take('Q')}s")).decode()

    def _take(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._content, self._at)
        self._at += struct.calcsize(f"<{code}")
        return value
