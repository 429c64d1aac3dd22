"""MXFP4: blocks of 32 four-bit numbers that share a power of two (OCP Microscaling 1.0, 2023).

    value   = fp4(code) · 2^(scale - 127)
    fp4     = sign · {0, 0.5, 1, 1.5, 2, 3, 4, 6}      (1 bit of sign, 2 of exponent, 1 of mantissa)

A byte holds two codes, the lower four bits first; blocks run along the columns. Every value but the
most extreme is exact in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ferryman.errors import ConfigError
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.weights.matrix import Matrix
from ferryman.model.weights.named_weights import WeightFormat, Weights
from ferryman.model.weights.quantisation.codes import FP4, Codes, NibbleCodes
from ferryman.model.weights.quantisation.quantised_matrix import QuantisedMatrix, even_groups

METHOD = "mxfp4"
BLOCK_LEN = 32
PACKED = "I8"
"""The stored dtype of two codes a byte in DeepSeek-V4."""
NOT_A_NUMBER = 255


@dataclass(frozen=True, slots=True)
class Mxfp4(WeightFormat):
    """gpt-oss's format: stacked experts are in codes, everything else in floats."""


def read_mxfp4(fields: ConfigFields) -> Mxfp4:
    """The format has no variants, so none of its fields is read."""
    return Mxfp4()


def mxfp4_matrices(
    weights: Weights, name: str, count: int, rows: int, columns: int
) -> tuple[Matrix, ...]:
    """`count` weights [rows, columns] in `<name>_blocks` and `<name>_scales`.

    Raises ConfigError for tensors of other shapes or dtypes, and for a scale that stands for
    not-a-number.
    """
    blocks_shape = (count, rows, columns // BLOCK_LEN, BLOCK_LEN // 2)
    blocks = weights.stored(f"{name}_blocks", blocks_shape, ("U8",))
    powers = read_powers(weights, f"{name}_scales", blocks_shape[:-1])
    return tuple(
        _in_blocks(weights, NibbleCodes(packed, columns, FP4), power)
        for packed, power in zip(blocks.flatten(2), powers, strict=True)
    )


def packed_matrix(weights: Weights, name: str, rows: int, columns: int) -> QuantisedMatrix:
    """A weight in bytes of two codes, stored as signed ones, with a scale in `<name>_scale_inv`.

    Raises ConfigError as `mxfp4_matrices`, and for columns that do not fill blocks.
    """
    if columns % BLOCK_LEN:
        raise ConfigError(
            f"{weights.checkpoint.folder}: tensor {weights.prefix}{name} is packed, and "
            f"config.json implies {columns} columns; blocks have {BLOCK_LEN}"
        )
    packed = weights.stored(name, (rows, columns // 2), (PACKED,)).view(torch.uint8)
    return with_powers(weights, f"{name}_scale_inv", NibbleCodes(packed, columns, FP4))


def with_powers(weights: Weights, name: str, codes: Codes) -> QuantisedMatrix:
    """A weight in `codes` whose blocks have the powers of two `name`. Raises ConfigError as
    `read_powers`."""
    rows, columns = codes.shape
    return _in_blocks(weights, codes, read_powers(weights, name, (rows, columns // BLOCK_LEN)))


def _in_blocks(weights: Weights, codes: Codes, powers: Tensor) -> QuantisedMatrix:
    groups = even_groups(codes.shape[1], BLOCK_LEN)
    return QuantisedMatrix(codes, powers, groups, None, weights.dtype, weights.device)


def read_powers(weights: Weights, name: str, shape: tuple[int, ...]) -> Tensor:
    """The scales `name`, each a power of two. Raises ConfigError for not-a-number."""
    scales = weights.stored(name, shape, ("U8", "F8_E8M0"))
    if not scales.is_meta and bool((scales.view(torch.uint8) == NOT_A_NUMBER).any()):
        raise ConfigError(
            f"{weights.checkpoint.folder}: tensor {weights.prefix}{name} holds "
            f"{NOT_A_NUMBER}, which stands for not-a-number"
        )
    return scales.view(torch.float8_e8m0fnu)
