"""The matrices of all experts of a layer as one stack on a card, in floats or in codes.

Matrices are views of files until they are copied, so they come in one expert at a time, and a
layer's experts never lie in memory twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ferryman.errors import ConfigError
from ferryman.model.weights.matrix import Matrix, PlainMatrix
from ferryman.model.weights.quantisation.codes import FP4 as FP4_TABLE
from ferryman.model.weights.quantisation.codes import INT4 as INT4_TABLE
from ferryman.model.weights.quantisation.codes import ByteCodes, Codes, NibbleCodes
from ferryman.model.weights.quantisation.nibble_matrix import NibbleMatrix
from ferryman.model.weights.quantisation.quantised_matrix import QuantisedMatrix, group_length
from ferryman.model.weights.smoothed_matrix import SmoothedMatrix
from ferryman_kernels.products.grouped_product import FP4, FP8, INT4, INT8, CodeStack, FloatStack


class ExpertStacks:
    """Collects, expert by expert, the matrices whose outputs stand side by side."""

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self._added = 0
        self._formats: list[_Format] = []
        self._wholes: list[list[Tensor]] = []

    def add(self, matrices: Sequence[Matrix]) -> None:
        parts = [_parts_of(matrix) for matrix in matrices]
        formats = [form for _, form in parts]
        if not self._added:
            self._formats = formats
            self._wholes = [self._empty(tensors, form) for tensors, form in parts]
        if formats != self._formats:
            raise ConfigError(
                "a layer's experts have several formats, and on a card they need one; "
                "use device=cpu"
            )
        for wholes, (tensors, _) in zip(self._wholes, parts, strict=True):
            for whole, tensor in zip(wholes, tensors, strict=True):
                whole[self._added].copy_(tensor)
        self._added += 1

    def made(self, biases: Sequence[Tensor | None]) -> tuple[FloatStack | CodeStack, ...]:
        present = [bias for bias in biases if bias is not None]
        lengths = [wholes[0].shape[1] for wholes in self._wholes]
        split: Sequence[Tensor | None] = [None] * len(lengths)
        if present:
            split = [
                part.contiguous() for part in torch.stack(present).split_with_sizes(lengths, dim=1)
            ]
        every = zip(self._wholes, self._formats, split, strict=True)
        return tuple(_stack(wholes, form, bias) for wholes, form, bias in every)

    def _empty(self, tensors: Sequence[Tensor], form: _Format) -> list[Tensor]:
        return [
            torch.empty((self._num_experts, *tensor.shape), dtype=dtype, device=form.device)
            for tensor, dtype in zip(tensors, form.dtypes, strict=True)
        ]


def _stack(wholes: Sequence[Tensor], form: _Format, bias: Tensor | None) -> FloatStack | CodeStack:
    if form.meaning is None:
        return FloatStack(wholes[0], bias)
    codes, scales, groups, *zeros = wholes
    return CodeStack(
        codes, form.meaning, scales, zeros[0] if zeros else None, groups, form.group_len, bias
    )


@dataclass(frozen=True, slots=True)
class _Format:
    """Matrices of one format make a stack. `meaning` is that of codes, None of floats; the order
    of groups may differ. `dtypes` are those in the stack."""

    meaning: int | None
    group_len: int
    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]
    device: torch.device


def _parts_of(matrix: Matrix) -> tuple[list[Tensor], _Format]:
    """A matrix's tensors, and their format in the stack."""
    match matrix:
        case PlainMatrix():
            tensors, dtypes, meaning, group_len = [matrix.stored], [matrix.dtype], None, 0
        case QuantisedMatrix():
            codes, meaning = _stored(matrix.codes)
            tensors = [codes, matrix.scales, matrix.groups]
            dtypes = [codes.dtype, matrix.scales.dtype, torch.int32]
            if matrix.zeros is not None:
                tensors.append(matrix.zeros)
                dtypes.append(matrix.zeros.dtype)
            group_len = group_length(matrix.groups)
        case NibbleMatrix():
            return _parts_of(matrix.by_groups())
        case SmoothedMatrix():
            raise ConfigError(
                "experts with a pre_quant_scale do not run on a card; use device=cpu, or a "
                "checkpoint without smoothed inputs"
            )
        case _:
            raise ConfigError(f"experts of {type(matrix).__name__} do not run on a card")
    shapes = tuple(tensor.shape for tensor in tensors)
    return tensors, _Format(meaning, group_len, shapes, tuple(dtypes), matrix.device)


def _stored(codes: Codes) -> tuple[Tensor, int]:
    match codes:
        case ByteCodes(tensor):
            return tensor, FP8 if tensor.dtype is torch.float8_e4m3fn else INT8
        case NibbleCodes(packed=packed, columns=columns, table=table):
            if columns % 2:
                raise ConfigError(f"a card needs experts in four bits of even columns: {columns}")
            if table in (INT4_TABLE, FP4_TABLE):
                return packed, INT4 if table == INT4_TABLE else FP4
            raise ConfigError(
                "experts in four bits by a table of their own, as bitsandbytes has them, do not "
                "run on a card; use device=cpu"
            )
    raise ConfigError(f"a card has no product with experts in {type(codes).__name__}")
