"""The tensors of a GGUF file under the names of a Hugging Face folder.

A view of a tensor in blocks, or of one that a converter changed, is made in float32; others are
views of the file. Nothing of it is kept: loaders copy what they read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ferryman.errors import ConfigError
from ferryman.gguf.architectures import tensors_of
from ferryman.gguf.architectures.tensor_names import NamedTensor, TensorForm, TensorPart
from ferryman.gguf.dequantisation import dequantised
from ferryman.gguf.model_file import is_gguf, is_head, model_files, read_model
from ferryman.model.weights.checkpoint import Checkpoint, map_file, open_checkpoint
from ferryman.model.weights.safetensors_header import StoredTensor

# Forms whose numbers are computed, and so are in float32.
_COMPUTED = (TensorForm.AROUND_ONE, TensorForm.LOG, TensorForm.LOG_NEGATED)


@dataclass(frozen=True, slots=True)
class GgufStoredTensor(StoredTensor):
    """A tensor of the folder; `dtype` is that of its view, `[start, end)` the bytes of its first
    part."""

    source: NamedTensor

    @property
    def places(self) -> tuple[StoredTensor, ...]:
        return tuple(_place(part) for part in self.source.parts)


@dataclass(frozen=True, slots=True)
class GgufCheckpoint(Checkpoint):
    """All tensors of a GGUF file and its shards."""

    def view(self, stored: StoredTensor) -> Tensor:
        """The tensor, as in `Checkpoint`. Raises ConfigError where there is but a head."""
        if is_head(self.folder):
            raise ConfigError(
                f"{self.folder} has no weights: it was fetched to be described; name the file or "
                "its repository"
            )
        if not isinstance(stored, GgufStoredTensor):
            return Checkpoint.view(self, stored)
        source = stored.source
        matrices = [self._matrix(source, parts) for parts in source.matrices]
        numbers = matrices[0] if len(matrices) == 1 else torch.stack(matrices)
        return _formed(numbers.reshape(stored.shape), source.form)

    def _matrix(self, source: NamedTensor, parts: tuple[TensorPart, ...]) -> Tensor:
        """[rows, columns] as the folder has them."""
        rows = [self._numbers(part) for part in parts]
        matrix = rows[0] if len(rows) == 1 else torch.cat(rows)
        if source.rows is not None:
            matrix = matrix[torch.from_numpy(source.rows)]
        if source.columns is not None:
            matrix = matrix[:, torch.from_numpy(source.columns)]
        return matrix.T if source.is_transposed else matrix

    def _numbers(self, part: TensorPart) -> Tensor:
        """The rows of a part; in float32 if they are in blocks."""
        place = _place(part)
        if not part.header.kind.is_quantised:
            numbers = Checkpoint.view(self, place)
        else:
            content = np.frombuffer(
                self.files[place.file].content, np.uint8, place.num_bytes, place.start
            )
            numbers = torch.from_numpy(dequantised(part.header.kind, content)).view(place.shape)
        return numbers.T if part.is_transposed else numbers


def open_gguf(file: Path) -> GgufCheckpoint:
    """The tensors of the model in `file`. Reads headers only.

    Raises ConfigError, by name, for a file, an architecture or a tensor that cannot be read.
    """
    tensors = {name: _stored(name, source) for name, source in tensors_of(read_model(file)).items()}
    return GgufCheckpoint(file, tensors, {path: map_file(path) for path in model_files(file)})


def open_model(model: Path | str) -> Checkpoint:
    """The tensors of a model folder or of a GGUF file. Raises ConfigError as `open_checkpoint` and
    `open_gguf` do."""
    path = Path(model)
    return open_gguf(path) if is_gguf(path) else open_checkpoint(path)


def _stored(name: str, source: NamedTensor) -> GgufStoredTensor:
    first = source.parts[0]
    kinds = {part.header.kind for part in source.parts}
    is_plain = len(kinds) == 1 and not first.header.kind.is_quantised
    dtype = first.header.kind.name if is_plain and source.form not in _COMPUTED else "F32"
    return GgufStoredTensor(
        name, first.header.file, dtype, source.shape, first.start, first.end, source
    )


def _place(part: TensorPart) -> StoredTensor:
    shape = (part.rows, part.columns)
    header = part.header
    return StoredTensor(part.name, header.file, header.kind.name, shape, part.start, part.end)


def _formed(numbers: Tensor, form: TensorForm) -> Tensor:
    match form:
        case TensorForm.AROUND_ONE:
            return numbers.to(torch.float32) - 1
        case TensorForm.LOG:
            return torch.log(numbers.to(torch.float32))
        case TensorForm.LOG_NEGATED:
            return torch.log(-numbers.to(torch.float32))
        case TensorForm.PLAIN:
            return numbers
