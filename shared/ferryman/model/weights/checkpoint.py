"""The safetensors files of a model folder, each opened once: its header read, its bytes mapped.

A mapping shares the page cache with every other process that reads the file, and is gone when the
checkpoint is. No model keeps one: `Weights` copies (docs/decisions/0056).
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ferryman.errors import ConfigError
from ferryman.model.shapes.config_fields import read_fields
from ferryman.model.weights.safetensors_header import StoredTensor, read_header

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")

TORCH_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""The stored dtypes that `Checkpoint.view` knows."""


@dataclass(frozen=True, slots=True)
class MappedFile:
    """A file's bytes, as long as they last, and the file's identity when it was mapped.

    The mapping is private: a write to a view would change no file. It is never closed by hand,
    because a tensor over it does not keep it open.
    """

    path: Path
    content: mmap.mmap
    identity: tuple[int, int, int, int]

    @property
    def has_changed(self) -> bool:
        """Whether another file is in its place, or other bytes in the file."""
        try:
            return _identity(self.path.stat()) != self.identity
        except OSError:
            return True


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All tensors of a folder, by name, and its files."""

    folder: Path
    tensors: Mapping[str, StoredTensor]
    files: Mapping[Path, MappedFile]

    def view(self, stored: StoredTensor) -> Tensor:
        """The tensor over its file's bytes: nothing is copied, and it is not to be kept.

        Raises ConfigError for a dtype that is not in TORCH_DTYPES.
        """
        if stored.dtype not in TORCH_DTYPES:
            raise ConfigError(
                f"{stored.file}: tensor {stored.name!r} has dtype {stored.dtype}; "
                f"supported are {', '.join(TORCH_DTYPES)}"
            )
        dtype, content = TORCH_DTYPES[stored.dtype], self.files[stored.file].content
        if not stored.num_bytes:
            return torch.empty(stored.shape, dtype=dtype)
        if stored.start % dtype.itemsize:
            # Only files of very early writers have headers that are not padded.
            shifted = torch.frombuffer(
                content, dtype=torch.uint8, count=stored.num_bytes, offset=stored.start
            )
            return shifted.clone().view(dtype).view(stored.shape)
        flat = torch.frombuffer(
            content, dtype=dtype, count=math.prod(stored.shape), offset=stored.start
        )
        return flat.view(stored.shape)

    @property
    def places(self) -> tuple[StoredTensor, ...]:
        """The tensors as they lie in the files, each once."""
        places = (place for tensor in self.tensors.values() for place in tensor.places)
        return tuple({(place.file, place.start, place.end): place for place in places}.values())

    def check_unchanged(self) -> None:
        """Raises ConfigError, by name, for a file that was changed since it was opened."""
        for file in self.files.values():
            if file.has_changed:
                raise ConfigError(f"{file.path} was changed while it was loaded; load it again")


def open_checkpoint(folder: Path | str) -> Checkpoint:
    """The tensors of `model.safetensors`, or of the shards its index names. Reads headers only.

    Raises ConfigError, naming the file, for a folder without safetensors and for bad headers.
    """
    folder = Path(folder)
    if (folder / SINGLE_FILE).is_file():
        mapped = map_file(folder / SINGLE_FILE)
        tensors = {tensor.name: tensor for tensor in _headers(mapped)}
        return Checkpoint(folder, tensors, {mapped.path: mapped})
    if (folder / INDEX_FILE).is_file():
        return _sharded(folder)
    raise ConfigError(_no_safetensors(folder))


def map_file(path: Path) -> MappedFile:
    """Maps a file of weights. Raises ConfigError for one that is missing, empty or unreadable."""
    if not path.is_file():
        raise ConfigError(f"{path} is missing; complete the download of the model")
    try:
        with path.open("rb") as opened:
            status = os.fstat(opened.fileno())
            # Private: torch has no tensors over memory that cannot be written.
            content = mmap.mmap(opened.fileno(), status.st_size, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a complete safetensors file: {error}") from None
    return MappedFile(path, content, _identity(status))


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _headers(mapped: MappedFile) -> tuple[StoredTensor, ...]:
    with memoryview(mapped.content) as content:
        return read_header(mapped.path, content)


def _no_safetensors(folder: Path) -> str:
    pickles = sorted(path.name for pattern in PICKLE_PATTERNS for path in folder.glob(pattern))
    if pickles:
        return (
            f"{folder / pickles[0]} is a pickle checkpoint, which can run code when loaded and is "
            f"refused; convert it to {SINGLE_FILE}"
        )
    return f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; name a Hugging Face model folder"


def _sharded(folder: Path) -> Checkpoint:
    fields = read_fields(folder / INDEX_FILE)
    weight_map = fields.raw.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise fields.refusal("weight_map", "an object from tensor name to file name")
    files = {path: map_file(path) for path in _shard_files(folder, weight_map)}
    tensors: dict[str, StoredTensor] = {}
    for mapped in files.values():
        for tensor in _headers(mapped):
            # Of two tensors of one name, the one in the file that the index names counts.
            if weight_map.get(tensor.name, mapped.path.name) == mapped.path.name:
                tensors[tensor.name] = tensor
    for name, file in sorted(weight_map.items()):
        if name not in tensors:
            raise ConfigError(f"{folder / file} lacks tensor {name!r}, which {INDEX_FILE} promises")
    return Checkpoint(folder, tensors, files)


def _shard_files(folder: Path, weight_map: Mapping[str, object]) -> list[Path]:
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ConfigError(
                f"{folder / INDEX_FILE} names {name!r}; a shard is a .safetensors file beside it"
            )
    return [folder / name for name in names]
