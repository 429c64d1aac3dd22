"""The format of a GGUF file whose weights in blocks stay in their codes.

A linear layer's or an expert's weight is kept if it has one type of `FORMS`, and if a converter
changed at most the order of its rows and columns. Columns are moved back by whole blocks; where
they cut blocks, the product's inputs are moved instead (`ReorderedMatrix`). Every other tensor is
read in floats: types without a form (Q2_K, Q3_K), rows of several types, transposed matrices, and
on several ranks weights whose columns are no whole blocks on each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ferryman.gguf.architectures.row_orders import whole_blocks
from ferryman.gguf.architectures.tensor_names import NamedTensor, TensorForm, TensorPart
from ferryman.gguf.model_file import is_gguf
from ferryman.model.weights.gguf_checkpoint import GgufStoredTensor
from ferryman.model.weights.matrix import Matrix
from ferryman.model.weights.named_weights import STORED_FLOATS, WeightFormat, Weights
from ferryman.model.weights.quantisation.gguf_matrix import FORMS, gguf_matrix
from ferryman.model.weights.reordered_matrix import ReorderedMatrix
from ferryman.model.weights.safetensors_header import StoredTensor
from ferryman_kernels.products.packed_product import reads_panels


@dataclass(frozen=True, slots=True)
class GgufBlocks(WeightFormat):
    """Weights in blocks are in codes, all others in floats."""

    def in_codes(self, weights: Weights, name: str, rows: int, columns: int) -> Matrix | None:
        return _single(weights, name, (rows, columns), is_transposed=False)

    def transposed_in_codes(
        self, weights: Weights, name: str, rows: int, columns: int
    ) -> Matrix | None:
        return _single(weights, name, (rows, columns), is_transposed=True)

    def stack_in_codes(
        self, weights: Weights, name: str, shape: tuple[int, int, int], *, is_transposed: bool
    ) -> tuple[Matrix, ...] | None:
        count, rows, columns = shape
        stored = _kept(weights, name, columns)
        if stored is None or stored.source.is_transposed != is_transposed:
            return None
        weights.checked(name, (count, columns, rows) if is_transposed else shape, STORED_FLOATS)
        source = stored.source
        return tuple(_matrix(weights, source, part, rows, columns) for part in source.matrices)


def keeps_blocks(model: Path, device: torch.device | str, dtype: torch.dtype) -> bool:
    """Whether there are products for the codes of a model: it is a GGUF file, on a processor whose
    loops read panels. A card and other processors get its weights in floats."""
    return is_gguf(model) and torch.device(device).type == "cpu" and reads_panels(dtype)


def _single(
    weights: Weights, name: str, shape: tuple[int, int], *, is_transposed: bool
) -> Matrix | None:
    """The matrix of `shape` that a file has in blocks; the folder may have its transpose."""
    stored = _kept(weights, name, shape[1])
    if stored is None or len(stored.shape) != 2 or stored.source.is_transposed != is_transposed:
        return None
    weights.checked(name, shape[::-1] if is_transposed else shape, STORED_FLOATS)
    return _matrix(weights, stored.source, stored.source.parts, *shape)


def _kept(weights: Weights, name: str, columns: int) -> GgufStoredTensor | None:
    """The header of a tensor that stays in its codes, or None."""
    stored = weights.header(name) if weights.has(name) else None
    if not isinstance(stored, GgufStoredTensor):
        return None
    source, kind = stored.source, stored.source.parts[0].header.kind
    is_even = all(part.header.kind == kind and not part.is_transposed for part in source.parts)
    is_kept = is_even and kind.name in FORMS and source.form is TensorForm.PLAIN
    if not is_kept or columns % (kind.block_len * weights.group.num_ranks):
        return None
    if source.columns is not None and weights.group.num_ranks > 1:
        return stored if whole_blocks(source.columns, kind.block_len) is not None else None
    return stored


def _matrix(
    weights: Weights, source: NamedTensor, parts: tuple[TensorPart, ...], rows: int, columns: int
) -> Matrix:
    """A matrix of parts in blocks of one type, in the folder's order."""
    kind = parts[0].header.kind
    matrix = gguf_matrix(
        kind.name,
        _content(weights, parts),
        rows,
        columns,
        dtype=weights.dtype,
        device=weights.device,
    )
    if source.rows is not None:
        matrix = matrix.with_rows(torch.from_numpy(source.rows))
    if source.columns is not None:
        order = whole_blocks(source.columns, kind.block_len)
        if order is None:
            return ReorderedMatrix(matrix, torch.from_numpy(source.columns))
        matrix = matrix.with_blocks(torch.from_numpy(order))
    return matrix


def _content(weights: Weights, parts: tuple[TensorPart, ...]) -> Tensor:
    """The bytes of parts, one after another; a view of the file if it is one."""
    contents = [weights.checkpoint.view(_bytes(part)) for part in parts]
    return contents[0] if len(contents) == 1 else torch.cat(contents)


def _bytes(part: TensorPart) -> StoredTensor:
    shape = (part.end - part.start,)
    return StoredTensor(part.name, part.header.file, "U8", shape, part.start, part.end)
