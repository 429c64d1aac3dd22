"""NVIDIA's Model Optimizer (modelopt): floats of 4 or 8 bits, and integers of 4 or 8 bits.

    quant_algo                                       weight             weight_scale
    NVFP4, W4A16_NVFP4, NVFP4_AWQ, W4A8_NVFP4_FP8    U8 [rows, half]    F8_E4M3 [rows, groups]
    W4A8_MXFP4_FP8                                   U8 [rows, half]    U8 [rows, groups]
    W4A16_AWQ, W4A8_AWQ                              U8 [half, columns] float [rows, groups]
    FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO        F8_E4M3            float [], [rows], by block
    MXFP8                                            F8_E4M3            U8 [rows, groups]
    W8A16, W8A8_SQ_PER_CHANNEL                       I8                 float [rows]

A layer's tensors say which of them it is in, so a mixture of them (`MIXED_PRECISION`) and layers
that were left out need no list. Scales in U8 are powers of two. Of NVFP4 `weight_scale_2` is the
tensor's factor. W4A8_AWQ has one as well: the unit of the numbers in FP8 that its kernels make of
the codes. Here the codes are multiplied as they are, so it is not read, and neither are
`input_scale`, `k_scale` and `v_scale`, by which activations, keys and values would be rounded.
`pre_quant_scale` multiplies the inputs before the product (`SmoothedMatrix`).

The fields are `quantization_config` of config.json, or `quantization` in hf_quant_config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from ferryman.errors import ConfigError
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.weights.matrix import Matrix
from ferryman.model.weights.named_weights import STORED_FLOATS, WeightFormat, Weights
from ferryman.model.weights.quantisation.codes import (
    FP4,
    INT4,
    ByteCodes,
    Codes,
    NibbleCodes,
    pack_nibbles,
)
from ferryman.model.weights.quantisation.fp8 import (
    FP8,
    PER_ROW,
    PER_TENSOR,
    ScaleBlock,
    fp8_codes,
    fp8_matrix,
    read_scales,
)
from ferryman.model.weights.quantisation.mxfp4 import with_powers
from ferryman.model.weights.quantisation.nvfp4 import nvfp4_matrix, read_factor
from ferryman.model.weights.quantisation.quantised_matrix import QuantisedMatrix, even_groups
from ferryman.model.weights.smoothed_matrix import SmoothedMatrix

MIXED = "MIXED_PRECISION"

_NVFP4_GROUPS = (16, 32)
_FP8_BLOCK = ScaleBlock(128, 128)
_MIDDLE = 8


@dataclass(frozen=True, slots=True)
class Modelopt(WeightFormat):
    """`algorithms` are those that the fields name; a layer in a layout of none is refused."""

    algorithms: tuple[str, ...]

    def in_codes(self, weights: Weights, name: str, rows: int, columns: int) -> Matrix | None:
        if not weights.has(f"{name}_scale") or weights.header(name).dtype in STORED_FLOATS:
            return None
        layout = _layout_of(weights, name)
        if layout not in [LAYOUTS[algorithm] for algorithm in self.algorithms]:
            raise ConfigError(
                f"{weights.checkpoint.folder}: {weights.prefix + name!r} is stored as {layout}, "
                f"but quant_algo names {', '.join(self.algorithms) or 'no weights'}"
            )
        matrix = _READERS[layout](weights, name, (rows, columns))
        inputs = f"{name.removesuffix('.weight')}.pre_quant_scale"
        if not weights.has(inputs):
            return matrix
        factors = weights.stored(inputs, (columns,), STORED_FLOATS)
        return SmoothedMatrix(matrix, factors.to(device=weights.device, dtype=weights.dtype))


class CodeLayout(StrEnum):
    """The tensors of a weight."""

    NVFP4 = "NVFP4"
    MXFP4 = "MXFP4"
    INT4 = "integers of 4 bits"
    FP8 = "FP8"
    MXFP8 = "MXFP8"
    INT8 = "integers of 8 bits"


def _layout_of(weights: Weights, name: str) -> CodeLayout:
    """The layout of a weight, by the dtypes of its codes and scales."""
    codes, scales = weights.header(name), weights.header(f"{name}_scale")
    scaled = "float" if scales.dtype in STORED_FLOATS else scales.dtype
    for layout, dtypes in _DTYPES.items():
        if dtypes == (codes.dtype, scaled):
            return layout
    raise ConfigError(
        f"{codes.file}: tensor {codes.name!r} has dtype {codes.dtype} and scales of "
        f"{scales.dtype}; known are {', '.join(map(' with '.join, _DTYPES.values()))}"
    )


def _nvfp4(weights: Weights, name: str, shape: tuple[int, int]) -> Matrix:
    length = _group_len(weights, name, shape[1])
    factor = read_factor(weights, f"{name}_scale_2")
    length = length if length in _NVFP4_GROUPS else _NVFP4_GROUPS[0]
    return nvfp4_matrix(weights, (name, f"{name}_scale"), shape, length, factor)


def _mxfp4(weights: Weights, name: str, shape: tuple[int, int]) -> Matrix:
    packed = weights.stored(name, (shape[0], shape[1] // 2), ("U8",))
    return with_powers(weights, f"{name}_scale", NibbleCodes(packed, shape[1], FP4))


def _mxfp8(weights: Weights, name: str, shape: tuple[int, int]) -> Matrix:
    return with_powers(weights, f"{name}_scale", fp8_codes(weights, name, shape))


def _fp8(weights: Weights, name: str, shape: tuple[int, int]) -> Matrix:
    stored_shape = weights.header(f"{name}_scale").shape
    block = PER_TENSOR
    if len(stored_shape) > 1 and stored_shape != (shape[0], 1):
        block = _FP8_BLOCK
    elif stored_shape not in ((), (1,)):
        block = PER_ROW
    return fp8_matrix(weights, name, shape, block)


def _int8(weights: Weights, name: str, shape: tuple[int, int]) -> Matrix:
    codes = ByteCodes(weights.stored(name, shape, ("I8",)))
    return _by_group(weights, codes, read_scales(weights, name, shape, PER_ROW), shape[1])


def _int4(weights: Weights, name: str, shape: tuple[int, int]) -> Matrix:
    """A byte holds two outputs of one input, the even one lower; codes have a sign."""
    rows, columns = shape
    pairs = weights.stored(name, (rows // 2, columns), ("U8",))
    signed = torch.stack((pairs & 0x0F, pairs >> 4), dim=1).flatten(0, 1)
    length = _group_len(weights, name, columns)
    scales = weights.stored(f"{name}_scale", (rows, columns // length), STORED_FLOATS)
    return _by_group(weights, pack_nibbles(signed ^ _MIDDLE, INT4), scales, length)


def _group_len(weights: Weights, name: str, columns: int) -> int:
    """The columns that share a scale, by its shape; all of them if it divides them unevenly."""
    *_, groups = (1, *weights.header(f"{name}_scale").shape)
    return columns // groups if groups and columns % groups == 0 else columns


def _by_group(weights: Weights, codes: Codes, scales: Tensor, length: int) -> QuantisedMatrix:
    groups = even_groups(codes.shape[1], length)
    return QuantisedMatrix(codes, scales, groups, None, weights.dtype, weights.device)


_DTYPES: Mapping[CodeLayout, tuple[str, str]] = {
    CodeLayout.NVFP4: ("U8", FP8),
    CodeLayout.MXFP4: ("U8", "U8"),
    CodeLayout.INT4: ("U8", "float"),
    CodeLayout.FP8: (FP8, "float"),
    CodeLayout.MXFP8: (FP8, "U8"),
    CodeLayout.INT8: ("I8", "float"),
}
"""The dtypes of codes and scales."""

_READERS: Mapping[CodeLayout, Callable[[Weights, str, tuple[int, int]], Matrix]] = {
    CodeLayout.NVFP4: _nvfp4,
    CodeLayout.MXFP4: _mxfp4,
    CodeLayout.INT4: _int4,
    CodeLayout.FP8: _fp8,
    CodeLayout.MXFP8: _mxfp8,
    CodeLayout.INT8: _int8,
}

LAYOUTS: Mapping[str, CodeLayout] = {
    "NVFP4": CodeLayout.NVFP4,
    "W4A16_NVFP4": CodeLayout.NVFP4,
    "NVFP4_AWQ": CodeLayout.NVFP4,
    "W4A8_NVFP4_FP8": CodeLayout.NVFP4,
    "W4A8_MXFP4_FP8": CodeLayout.MXFP4,
    "W4A16_AWQ": CodeLayout.INT4,
    "W4A8_AWQ": CodeLayout.INT4,
    "FP8": CodeLayout.FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": CodeLayout.FP8,
    "FP8_PB_WO": CodeLayout.FP8,
    "MXFP8": CodeLayout.MXFP8,
    "W8A16": CodeLayout.INT8,
    "W8A8_SQ_PER_CHANNEL": CodeLayout.INT8,
}
"""The layout of each algorithm that is read."""


def read_modelopt(fields: ConfigFields) -> Modelopt:
    """`quant_method` modelopt. Raises ConfigError, by name, for algorithms that are not read."""
    fields = fields.merged_with("quantization")
    algorithm, layers = fields.raw.get("quant_algo"), fields.inner("quantized_layers")
    if algorithm is None:
        # Keys and values alone were quantised.
        return Modelopt(())
    if algorithm != MIXED:
        return Modelopt((_known(fields),))
    if not layers.raw:
        raise fields.refusal("quantized_layers", "an object from layer to its quant_algo")
    return Modelopt(tuple(sorted({_known(layers.inner(name)) for name in layers.raw})))


def _known(fields: ConfigFields) -> str:
    algorithm = str(fields.raw.get("quant_algo")).upper()
    if algorithm not in LAYOUTS:
        choice = ", ".join((*LAYOUTS, MIXED))
        raise fields.refusal("quant_algo", f"one of {choice}; export the model with one of these")
    return algorithm
