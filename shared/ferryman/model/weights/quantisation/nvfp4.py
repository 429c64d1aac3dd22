"""NVFP4: codes of four bits, a scale in FP8 for 16 of them, and one in float32 for the tensor.

    value[i, j] = e2m1[i, j] · e4m3[i, j // 16] · factor

    modelopt              weight, U8    weight_scale    factor = weight_scale_2
    compressed-tensors    weight_packed weight_scale    factor = 1 / weight_global_scale

A byte holds two neighbours of a row, the even column lower. Cards that multiply four bits by four
make codes of their inputs as well, with `input_scale` (`input_global_scale`). Here inputs stay in
the model's dtype, so that scale is not read, and results are nearer to those of the model before it
was quantised.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ferryman.errors import ConfigError
from ferryman.model.weights.named_weights import Weights, accumulation_dtype
from ferryman.model.weights.quantisation.codes import FP4, NibbleCodes
from ferryman.model.weights.quantisation.fp8 import fp8_codes
from ferryman.model.weights.quantisation.nibble_matrix import NibbleMatrix

_FACTOR_DTYPES = ("F32", "BF16", "F16", "F64")


def nvfp4_matrix(
    weights: Weights, names: tuple[str, str], shape: tuple[int, int], group_len: int, factor: Tensor
) -> NibbleMatrix:
    """The weight of the tensors `names`, its codes and its scales, times `factor`, one number.

    Raises ConfigError for other shapes and dtypes, and for not-a-number among the scales.
    """
    rows, columns = shape
    if columns % group_len:
        raise ConfigError(
            f"{weights.checkpoint.folder}: tensor {weights.prefix + names[0]!r} has {columns} "
            f"columns, which are no whole groups of {group_len}"
        )
    codes = weights.stored(names[0], (rows, columns // 2), ("U8",))
    scales = fp8_codes(weights, names[1], (rows, columns // group_len)).tensor
    return NibbleMatrix(
        NibbleCodes(codes, columns, FP4),
        scales,
        factor.expand(rows, 1),
        group_len,
        weights.dtype,
        weights.device,
    )


def read_factor(weights: Weights, name: str) -> Tensor:
    """The one number in the tensor `name` as [1, 1] in the accumulation dtype.

    Raises ConfigError unless it is finite and above 0.
    """
    stored_shape = weights.header(name).shape
    if stored_shape not in ((), (1,)):
        weights.checked(name, (), _FACTOR_DTYPES)
    number = weights.stored(name, stored_shape, _FACTOR_DTYPES)
    if not number.is_meta and not (bool(number.isfinite().all()) and float(number) > 0):
        raise ConfigError(
            f"{weights.checkpoint.folder}: tensor {weights.prefix + name!r} is {float(number)}, "
            "but must be finite and above 0"
        )
    return number.to(accumulation_dtype(weights.dtype)).expand(1, 1)


def inverse(factor: Tensor) -> Tensor:
    """1 / factor, for tools that store what numbers were multiplied by."""
    return torch.ones_like(factor) / factor
