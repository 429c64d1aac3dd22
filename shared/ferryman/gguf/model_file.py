"""A model in GGUF: one file, or the shards that its first one counts."""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ferryman.errors import ConfigError
from ferryman.gguf.container import (
    FLOAT32,
    INT64,
    UINT64,
    GgufHead,
    MetadataValue,
    StoredArray,
    TensorHeader,
    read_head,
)
from ferryman.gguf.dequantisation.short_blocks import Floats
from ferryman.gguf.tensor_types import TYPE_NAMES

SUFFIX = ".gguf"
HEAD_ENDING = "-head"
"""Follows the name of a file of which only the head is here (`gguf_files.py`)."""
MAX_SHARDS = 10_000
_SHARD = re.compile(rf"(.*)-(\d{{5}})-of-(\d{{5}})(\.gguf(?:{HEAD_ENDING})?)")


@dataclass(frozen=True, slots=True)
class GgufMetadata:
    """Typed reading of the keys of a file: a missing or wrong one is a ConfigError by name.

    `{arch}` in a key stands for the file's architecture.
    """

    file: Path
    values: Mapping[str, MetadataValue]

    @property
    def architecture(self) -> str:
        return self.text("general.architecture")

    @property
    def num_layers(self) -> int:
        """The layers of the model itself, without those for multi-token prediction."""
        every, drafting = "{arch}.block_count", "{arch}.nextn_predict_layers"
        num_drafting = self.whole(drafting, 0)
        if num_drafting > self.whole(every):
            raise self.refusal(drafting, f"at most the {self.whole(every)} of block_count")
        return self.whole(every) - num_drafting

    def has(self, key: str) -> bool:
        return self._key(key) in self.values

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.refusal(key, "a text")
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.refusal(key, "a whole number from 0 on")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number; one of 32 bits is read as the decimal number that it was written from."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refusal(key, "a number")
        # 0.00001 was stored as the nearest of 32 bits: its shortest decimal form is the number.
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.refusal(key, "true or false")
        return value

    def words(self, key: str) -> list[str]:
        """An array of texts."""
        return [str(element) for element in self._array(key, (str,), "an array of texts")]

    def numbers(self, key: str) -> list[float]:
        return [float(element) for element in self._array(key, (int, float), "an array of numbers")]

    def wholes(self, key: str) -> list[int]:
        """An array of whole numbers or flags; one number counts for every layer."""
        if isinstance(self.values.get(self._key(key)), int):
            return [self.whole(key)] * self.whole("{arch}.block_count")
        return [int(element) for element in self._array(key, (int,), "an array of whole numbers")]

    def stored_numbers(self, key: str) -> TensorHeader:
        """An array of a number of 32 bits for each layer, as a tensor: its bytes lie in the head of
        the file."""
        value, count = self.values.get(self._key(key)), self.whole("{arch}.block_count")
        if not isinstance(value, StoredArray) or (value.type_number, value.count) != (
            FLOAT32,
            count,
        ):
            raise self.refusal(key, f"an array of {count} numbers of 32 bits, one for each layer")
        kind = TYPE_NAMES["F32"]
        end = value.start + len(value.content)
        return TensorHeader(self._key(key), self.file, kind, (count,), value.start, end)

    def stored_wholes(self, key: str) -> TensorHeader:
        """An array of whole numbers of 64 bits as a tensor, whose bytes lie in the head."""
        value = self.values.get(self._key(key))
        if not isinstance(value, StoredArray) or value.type_number not in (INT64, UINT64):
            raise self.refusal(key, "an array of whole numbers of 64 bits")
        end = value.start + len(value.content)
        kind = TYPE_NAMES["I64"]
        return TensorHeader(self._key(key), self.file, kind, (value.count,), value.start, end)

    def refusal(self, key: str, expected: str) -> ConfigError:
        """The error that names the file, the key, its value and the expected one."""
        value = self.values.get(self._key(key), "missing")
        text = "an array" if isinstance(value, StoredArray) else repr(value)[:80]
        return ConfigError(f"{self.file}: key {self._key(key)!r} must be {expected}; it is {text}")

    def _key(self, key: str) -> str:
        if "{arch}" not in key:
            return key
        return key.replace("{arch}", self.architecture)

    def _value(self, key: str, default: MetadataValue | None) -> MetadataValue:
        value = self.values.get(self._key(key), default)
        if value is None:
            raise self.refusal(key, "given")
        return value

    def _array(
        self, key: str, types: tuple[type, ...], expected: str
    ) -> list[int] | list[float] | list[bool] | list[str]:
        value = self.values.get(self._key(key))
        if not isinstance(value, StoredArray):
            raise self.refusal(key, expected)
        try:
            elements = value.elements()
        except UnicodeDecodeError:
            raise self.refusal(key, "an array of texts in UTF-8") from None
        if not all(isinstance(element, types) for element in elements):
            raise self.refusal(key, expected)
        return elements


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The metadata of a model, and its tensors by llama.cpp's names. `contents` are the bytes of
    its files, mapped for as long as the value is kept."""

    metadata: GgufMetadata
    tensors: Mapping[str, TensorHeader]
    contents: Mapping[Path, memoryview]

    def floats(self, name: str) -> Floats:
        """A small tensor of floats. Raises ConfigError if it is missing or quantised."""
        tensor = self.tensors.get(name)
        if tensor is None or tensor.kind.name != "F32":
            raise ConfigError(f"{self.metadata.file}: tensor {name!r} must be there, in F32")
        content = self.contents[tensor.file][tensor.start : tensor.end]
        return np.frombuffer(content, dtype="<f4").reshape(tensor.shape)


def is_gguf(model: Path) -> bool:
    """True for the path of a file, not a folder, with the name of a GGUF file or of its head."""
    return model.suffix in (SUFFIX, SUFFIX + HEAD_ENDING) and model.is_file()


def is_head(model: Path) -> bool:
    """Whether the path is that of a head, without weights."""
    return model.suffix == SUFFIX + HEAD_ENDING


def model_exists(model: Path) -> bool:
    """Whether the path is a folder, or a GGUF file."""
    return model.is_dir() or is_gguf(model)


def model_files(first: Path) -> tuple[Path, ...]:
    """The files of a model by its first one. Raises ConfigError for a later shard."""
    match = _SHARD.fullmatch(first.name)
    if match is None:
        return (first,)
    stem, number, count, ending = match[1], int(match[2]), int(match[3]), match[4]
    if number != 1 or not 1 <= count <= MAX_SHARDS:
        raise ConfigError(f"{first}: name the first shard, {stem}-00001-of-{count:05}{SUFFIX}")
    return tuple(
        first.with_name(f"{stem}-{shard:05}-of-{count:05}{ending}") for shard in range(1, count + 1)
    )


def model_name(model: Path) -> str:
    """The name of a folder, or of a GGUF file without its ending and its number as a shard."""
    if not is_gguf(model):
        return model.resolve().name
    match = _SHARD.fullmatch(model.name)
    return match[1] if match else model.stem


def read_model(first: Path) -> GgufFile:
    """The model in the file `first` and in the shards after it.

    Raises ConfigError, naming the file, for one that is missing or that cannot be read.
    """
    contents = {file: _mapped(file) for file in model_files(first)}
    heads = [read_head(file, content, len(content)) for file, content in contents.items()]
    metadata = GgufMetadata(first, heads[0].metadata)
    _check_shards(metadata, heads)
    tensors: dict[str, TensorHeader] = {}
    for head in heads:
        for tensor in head.tensors:
            if tensor.name in tensors:
                raise ConfigError(f"{head.file}: tensor {tensor.name!r} is in two shards")
            tensors[tensor.name] = tensor
    return GgufFile(metadata, tensors, contents)


def _check_shards(metadata: GgufMetadata, heads: list[GgufHead]) -> None:
    count = metadata.whole("split.count", 0) or 1
    if count != len(heads):
        raise metadata.refusal("split.count", f"the {len(heads)} that the file's name says")


def _mapped(file: Path) -> memoryview:
    if not file.is_file():
        raise ConfigError(f"{file} is missing; complete the download of the model")
    if not file.stat().st_size:
        raise ConfigError(f"{file} is empty; complete the download of the model")
    try:
        with file.open("rb") as opened:
            return memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is not a complete GGUF file: {error}") from None
