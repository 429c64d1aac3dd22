"""Weights in FP8 (E4M3): with a scale for each block, each output, or one for the tensor.

    value[i, j] = e4m3[i, j] · scale        scale_inv[i // 128, j // 128], scale[i] or scale

`weight_scale_inv` and `weight_scale` are both multiplied by. Blocks at the edges may be cut off.
Published kernels round activations to 8 bits too; here these stay in the model's dtype, so an input
scale is not read. Experts of DeepSeek-V4 are beside them in MXFP4, two codes in a signed byte.

    quant_method      weight_block_size     scales
    fp8               [128, 128] or other   a block        DeepSeek-V3, Qwen3-Next-FP8, Qwen3.5-FP8
    fp8               absent                a tensor       Ministral 3, AutoFP8
    fbgemm_fp8        absent                an output      Llama-3.1-405B-Instruct-FP8
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ferryman.errors import ConfigError
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.weights.matrix import Matrix
from ferryman.model.weights.named_weights import STORED_FLOATS, WeightFormat, Weights
from ferryman.model.weights.quantisation.codes import ByteCodes
from ferryman.model.weights.quantisation.mxfp4 import PACKED, packed_matrix
from ferryman.model.weights.quantisation.quantised_matrix import QuantisedMatrix, even_groups

FP8 = "F8_E4M3"
SCALE_DTYPES = (*STORED_FLOATS, "F8_E8M0")
SCALE_NAMES = ("scale_inv", "scale")

_NOT_A_NUMBER = 0x7F


@dataclass(frozen=True, slots=True)
class ScaleBlock:
    """The rows and columns that share a scale; 0 stands for all of them."""

    rows: int
    columns: int

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """The shape of the scales of a weight [rows, columns]."""
        return _num_blocks(rows, self.rows), _num_blocks(columns, self.columns)


PER_TENSOR = ScaleBlock(0, 0)
PER_ROW = ScaleBlock(1, 0)


@dataclass(frozen=True, slots=True)
class Fp8(WeightFormat):
    """Weights stored in F8_E4M3 are in codes with a scale for each block, those in bytes of two
    codes in MXFP4; all others in floats."""

    block: ScaleBlock

    def in_codes(self, weights: Weights, name: str, rows: int, columns: int) -> Matrix | None:
        dtype = weights.header(name).dtype if weights.has(name) else ""
        if dtype == PACKED:
            return packed_matrix(weights, name, rows, columns)
        return fp8_matrix(weights, name, (rows, columns), self.block) if dtype == FP8 else None


def fp8_matrix(
    weights: Weights, name: str, shape: tuple[int, int], block: ScaleBlock
) -> QuantisedMatrix:
    """The weight `name` with its scales. Raises ConfigError for not-a-number among the codes."""
    codes = fp8_codes(weights, name, shape)
    scales = read_scales(weights, name, shape, block)
    groups = even_groups(shape[1], block.columns or shape[1])
    return QuantisedMatrix(codes, scales, groups, None, weights.dtype, weights.device)


def fp8_codes(weights: Weights, name: str, shape: tuple[int, int]) -> ByteCodes:
    """The codes of the weight `name`. Raises ConfigError for not-a-number among them."""
    codes = weights.stored(name, shape, (FP8,))
    if not codes.is_meta and _has_not_a_number(codes):
        full_name = weights.prefix + name
        raise ConfigError(f"{weights.checkpoint.folder}: tensor {full_name!r} holds not-a-number")
    return ByteCodes(codes)


def read_scales(weights: Weights, name: str, shape: tuple[int, int], block: ScaleBlock) -> Tensor:
    """The scales [rows, column blocks] of the weight `name`, in `<name>_scale_inv` or `_scale`."""
    full_name = weights.first_of(*(f"{name}_{suffix}" for suffix in SCALE_NAMES))
    rows = shape[0]
    expected: tuple[int, ...] = block.shape(*shape)
    stored_shape = weights.header(full_name).shape
    if block == PER_TENSOR and stored_shape in ((), (1,)):
        return weights.stored(full_name, stored_shape, SCALE_DTYPES).expand(1, 1).expand(rows, 1)
    if block == PER_ROW and stored_shape == (rows,):
        return weights.stored(full_name, stored_shape, SCALE_DTYPES)[:, None]
    if stored_shape == (expected[0], 1, expected[1], 1):  # modelopt's blocks
        expected = stored_shape
    scales = weights.stored(full_name, expected, SCALE_DTYPES).reshape(block.shape(*shape))
    if block.rows == 1:
        return scales
    if scales.dtype is torch.float8_e8m0fnu:
        scales = scales.float()
    return scales.repeat_interleave(block.rows or rows, 0)[:rows]


def read_fp8(fields: ConfigFields) -> Fp8:
    """`quant_method` fp8. Raises ConfigError, by field name, for other kinds of floats, also where
    modelopt made some of the layers anew."""
    if fields.raw.get("quant_algo") is not None:
        raise fields.refusal("quant_algo", "absent for quant_method fp8")
    if fields.raw.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise fields.refusal("fmt", "e4m3")
    size = fields.raw.get("weight_block_size")
    if size is None:
        return Fp8(PER_TENSOR)
    match size:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return Fp8(ScaleBlock(rows, columns))
    raise fields.refusal("weight_block_size", "two whole numbers above 0, such as [128, 128]")


def read_fbgemm(fields: ConfigFields) -> Fp8:
    """`quant_method` fbgemm_fp8: a scale for each output."""
    return Fp8(PER_ROW)


def _has_not_a_number(codes: Tensor) -> bool:
    return bool(((codes.view(torch.uint8) & _NOT_A_NUMBER) == _NOT_A_NUMBER).any())


def _num_blocks(length: int, block: int) -> int:
    """The number of blocks along an axis of `length` weights."""
    return -(-length // block) if block else 1
