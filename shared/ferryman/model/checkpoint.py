"""The safetensors files of a model folder: where each tensor is, and what its header says.

A safetensors file is eight bytes of header length (little-endian), a JSON header, then the bytes
of all tensors; offsets in the header count from its end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ferryman.errors import ConfigError
from ferryman.model.fields import read_fields

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")

_HEADER_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as its file's header describes it; `[start, end)` are byte offsets in the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    def read(self) -> Tensor:
        with safe_open(self.file, framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(self.name)
        return tensor


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All tensors of a folder, by name."""

    folder: Path
    tensors: Mapping[str, StoredTensor]


def open_checkpoint(folder: Path | str) -> Checkpoint:
    """The tensors of `model.safetensors`, or of the shards its index names. Reads headers only."""
    folder = Path(folder)
    if (folder / SINGLE_FILE).is_file():
        stored = _headers(folder / SINGLE_FILE)
        return Checkpoint(folder, {tensor.name: tensor for tensor in stored})
    if (folder / INDEX_FILE).is_file():
        return Checkpoint(folder, _sharded(folder))
    raise ConfigError(_no_safetensors(folder))


def _no_safetensors(folder: Path) -> str:
    pickles = sorted(path.name for pattern in PICKLE_PATTERNS for path in folder.glob(pattern))
    if pickles:
        return (
            f"{folder / pickles[0]} is a pickle checkpoint, which can run code when loaded and is "
            f"refused; convert it to {SINGLE_FILE}"
        )
    return f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; name a Hugging Face model folder"


def _sharded(folder: Path) -> dict[str, StoredTensor]:
    fields = read_fields(folder / INDEX_FILE)
    weight_map = fields.raw.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise fields.refusal("weight_map", "an object from tensor name to file name")
    found = {t.name: t for file in _shard_files(folder, weight_map) for t in _headers(file)}
    for name, file in sorted(weight_map.items()):
        if name not in found:
            raise ConfigError(f"{folder / file} lacks tensor {name!r}, which {INDEX_FILE} promises")
    return found


def _shard_files(folder: Path, weight_map: Mapping[str, object]) -> list[Path]:
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ConfigError(
                f"{folder / INDEX_FILE} names {name!r}; a shard is a .safetensors file beside it"
            )
    return [folder / name for name in names]


def _headers(file: Path) -> list[StoredTensor]:
    """Every tensor of `file`, in the order of bytes. safetensors itself checks the header."""
    try:
        with safe_open(file, framework="pt"):
            pass
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(_HEADER_LENGTH_BYTES), "little")
            header = json.loads(opened.read(length))
    except FileNotFoundError:
        raise ConfigError(f"{file} is missing; complete the download of the model") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise ConfigError(f"{file} is not a complete safetensors file: {error}") from None
    begin = _HEADER_LENGTH_BYTES + length
    stored = [
        StoredTensor(
            name,
            file,
            entry["dtype"],
            tuple(entry["shape"]),
            begin + entry["data_offsets"][0],
            begin + entry["data_offsets"][1],
        )
        for name, entry in header.items()
        if name != "__metadata__"
    ]
    return sorted(stored, key=lambda tensor: (tensor.start, tensor.name))
