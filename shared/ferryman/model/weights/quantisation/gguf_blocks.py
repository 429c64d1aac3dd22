"""The format of a GGUF file whose weights in blocks stay in their codes.

A linear layer's weight is kept if it has one type of `FORMS`, and if a converter changed at most
the order of its rows. Every other tensor is read in floats: types without a form (Q2_K, Q3_K),
rows of several types, experts that are stored as one tensor of joined parts, and on several ranks
weights whose columns are no whole blocks on each of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ferryman.gguf.architectures.tensor_names import TensorForm
from ferryman.gguf.model_file import is_gguf
from ferryman.gguf.tensor_types import TensorType
from ferryman.model.weights.gguf_checkpoint import GgufStoredTensor, folder_rows
from ferryman.model.weights.matrix import Matrix
from ferryman.model.weights.named_weights import STORED_FLOATS, WeightFormat, Weights
from ferryman.model.weights.quantisation.gguf_matrix import FORMS, gguf_matrix
from ferryman_kernels.products.packed_product import reads_panels


@dataclass(frozen=True, slots=True)
class GgufBlocks(WeightFormat):
    """Weights in blocks are in codes, all others in floats."""

    def in_codes(self, weights: Weights, name: str, rows: int, columns: int) -> Matrix | None:
        kind = _kept_type(weights, name)
        if kind is None or columns % (kind.block_len * weights.group.num_ranks):
            return None
        stored = weights.checked(name, (rows, columns), STORED_FLOATS)
        assert isinstance(stored, GgufStoredTensor)
        matrix = gguf_matrix(
            kind.name,
            _content(weights, stored),
            rows,
            columns,
            dtype=weights.dtype,
            device=weights.device,
        )
        is_paired = stored.source.form is TensorForm.PAIRED
        return matrix.with_rows(folder_rows(stored.source)) if is_paired else matrix


def keeps_blocks(model: Path, device: torch.device | str, dtype: torch.dtype) -> bool:
    """Whether there are products for the codes of a model: it is a GGUF file, on a processor whose
    loops read panels. A card and other processors get its weights in floats."""
    return is_gguf(model) and torch.device(device).type == "cpu" and reads_panels(dtype)


def _kept_type(weights: Weights, name: str) -> TensorType | None:
    stored = weights.header(name) if weights.has(name) else None
    if not isinstance(stored, GgufStoredTensor):
        return None
    source = stored.source
    kinds = {part.header.kind for part in source.parts}
    kind = source.parts[0].header.kind
    in_order = source.form in (TensorForm.PLAIN, TensorForm.PAIRED)
    is_kept = len(kinds) == 1 and kind.name in FORMS and in_order and len(stored.shape) == 2
    return kind if is_kept else None


def _content(weights: Weights, stored: GgufStoredTensor) -> Tensor:
    """The bytes of a tensor's parts, one part after another; a view of the file if it is one."""
    contents = [
        weights.checkpoint.view(replace(place, dtype="U8", shape=(place.num_bytes,)))
        for place in stored.places
    ]
    return contents[0] if len(contents) == 1 else torch.cat(contents)
