"""compressed-tensors (llm-compressor): floats of 4 or 8 bits, and integers of 4 or 8 bits.

    float-quantized         weight, F8_E4M3                   weight_scale
    int-quantized           weight, I8                        weight_scale, weight_zero_point
    naive-quantized         either of these
    pack-quantized          weight_packed, I32 [rows, words]  as int-quantized, and weight_g_idx
    nvfp4-pack-quantized    weight_packed, U8 [rows, half]    weight_scale, weight_global_scale
    mxfp4-pack-quantized    weight_packed, U8 [rows, half]    weight_scale, U8
    mxfp8-quantized         weight, F8_E4M3                   weight_scale, U8
    mixed-precision         each group has its `format`

Packed integers count from 0, zero points from the middle as well, and those are packed along the
outputs. Scales in U8 are powers of two. A group of the config sets how many weights of its targets
share a scale (`strategy`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ferryman.errors import ConfigError
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.weights.matrix import Matrix
from ferryman.model.weights.named_weights import WeightFormat, Weights
from ferryman.model.weights.quantisation.codes import (
    FP4,
    PACKED_BITS,
    ByteCodes,
    NibbleCodes,
    middle,
    num_words,
    signed_codes,
    unpacked_words,
    zeros_or_none,
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
from ferryman.model.weights.quantisation.nibble_matrix import NibbleMatrix
from ferryman.model.weights.quantisation.nvfp4 import inverse, nvfp4_matrix, read_factor
from ferryman.model.weights.quantisation.quantised_matrix import QuantisedMatrix, even_groups

NVFP4, MXFP4, MXFP8 = "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"
FORMATS = (
    "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", NVFP4, MXFP4, MXFP8,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scheme:
    """A group of the config: its targets, its format, the bits of its codes, and what shares a
    scale."""

    targets: tuple[str, ...]
    layout: str
    bits: int
    block: ScaleBlock

    def has(self, module: str) -> bool:
        """Whether `module` is a target: all linear layers are "Linear", "re:" is a pattern."""
        return any(
            target == "Linear"
            or target == module
            or (target.startswith("re:") and re.match(target[3:], module) is not None)
            for target in self.targets
        )


@dataclass(frozen=True, slots=True)
class CompressedTensors(WeightFormat):
    """Modules that are left out (`ignore`) are those with a weight in floats."""

    schemes: tuple[Scheme, ...]

    def in_codes(self, weights: Weights, name: str, rows: int, columns: int) -> Matrix | None:
        module, shape = name.removesuffix(".weight"), (rows, columns)
        if weights.has(f"{module}.weight_packed"):
            scheme = self._scheme(weights, name)
            return _PACKED.get(scheme.layout, _integers)(weights, module, shape, scheme)
        dtype = weights.header(name).dtype if weights.has(name) else ""
        if dtype == FP8:
            if self._scheme(weights, name).layout == MXFP8:
                return with_powers(weights, f"{name}_scale", fp8_codes(weights, name, shape))
            return fp8_matrix(weights, name, shape, self._scheme(weights, name).block)
        if dtype == "I8":
            return _bytes(weights, name, shape, self._scheme(weights, name).block)
        return None

    def _scheme(self, weights: Weights, name: str) -> Scheme:
        module = f"{weights.prefix}{name}".removesuffix(".weight")
        for scheme in self.schemes:
            if scheme.has(module):
                return scheme
        raise ConfigError(
            f"{weights.checkpoint.folder}: {module!r} is quantised, but no group of "
            "config_groups has it among its targets"
        )


def _bytes(
    weights: Weights, name: str, shape: tuple[int, int], block: ScaleBlock
) -> QuantisedMatrix:
    codes = ByteCodes(weights.stored(name, shape, ("I8",)))
    zeros = None
    if weights.has(f"{name}_zero_point"):
        zeros_shape = weights.header(f"{name}_zero_point").shape
        stored = weights.stored(f"{name}_zero_point", zeros_shape, ("I8",))
        zeros = zeros_or_none(stored.reshape(-1, block.shape(*shape)[1]).expand(shape[0], -1))
    scales = read_scales(weights, name, shape, block)
    groups = even_groups(shape[1], block.columns or shape[1])
    return QuantisedMatrix(codes, scales, groups, zeros, weights.dtype, weights.device)


def _nvfp4(weights: Weights, module: str, shape: tuple[int, int], scheme: Scheme) -> NibbleMatrix:
    name = f"{module}.weight"
    factor = inverse(read_factor(weights, f"{name}_global_scale"))
    tensors = f"{name}_packed", f"{name}_scale"
    return nvfp4_matrix(weights, tensors, shape, scheme.block.columns or shape[1], factor)


def _mxfp4(
    weights: Weights, module: str, shape: tuple[int, int], scheme: Scheme
) -> QuantisedMatrix:
    rows, columns = shape
    packed = weights.stored(f"{module}.weight_packed", (rows, columns // 2), ("U8",))
    return with_powers(weights, f"{module}.weight_scale", NibbleCodes(packed, columns, FP4))


def _integers(
    weights: Weights, module: str, shape: tuple[int, int], scheme: Scheme
) -> QuantisedMatrix:
    (rows, columns), bits, name = shape, scheme.bits, f"{module}.weight"
    packed = weights.stored(f"{name}_packed", (rows, num_words(columns, bits)), ("I32",))
    length, zeros = scheme.block.columns or columns, None
    if weights.has(f"{name}_zero_point"):
        dims = num_words(rows, bits), scheme.block.shape(*shape)[1]
        stored = weights.stored(f"{name}_zero_point", dims, ("I32",))
        zeros = zeros_or_none(unpacked_words(stored.T, bits, rows).T - middle(bits))
    groups = even_groups(columns, length)
    if weights.has(f"{name}_g_idx"):
        stored = weights.stored(f"{name}_g_idx", (columns,), ("I32",))
        groups = groups if stored.is_meta else stored.to(torch.int64)
    return QuantisedMatrix(
        signed_codes(unpacked_words(packed, bits, columns), bits),
        read_scales(weights, name, shape, scheme.block),
        groups,
        zeros,
        weights.dtype,
        weights.device,
    )


_Reader = Callable[[Weights, str, tuple[int, int], Scheme], Matrix]
_PACKED: Mapping[str, _Reader] = {NVFP4: _nvfp4, MXFP4: _mxfp4}
"""The readers of packed floats, by format; packed integers are the rest."""


def read_compressed_tensors(fields: ConfigFields) -> CompressedTensors:
    """`quant_method` compressed-tensors. Raises ConfigError, by field name, for other formats."""
    if fields.inner("sparsity_config").raw.get("format", "dense") != "dense":
        raise fields.refusal("sparsity_config", "absent, or of format dense")
    if fields.inner("transform_config").raw:
        # Rotated inputs: without the rotation, the codes stand for another model.
        raise fields.refusal("transform_config", "absent, or empty")
    groups = fields.inner("config_groups")
    if not groups.raw:
        raise fields.refusal("config_groups", "an object with a group of targets")
    return CompressedTensors(tuple(_read_scheme(fields, groups.inner(name)) for name in groups.raw))


def _read_scheme(fields: ConfigFields, group: ConfigFields) -> Scheme:
    layout = group.raw.get("format") or fields.raw.get("format")
    if layout not in FORMATS:
        raise fields.refusal("format", " or ".join(FORMATS))
    weights = group.inner("weights")
    bits, kind = weights.whole("num_bits"), weights.raw.get("type", "int")
    float_bits = 4 if layout in _PACKED else 8
    if bits not in PACKED_BITS or (kind == "float" and bits != float_bits):
        raise weights.refusal("num_bits", f"4 or 8 of type int, or {float_bits} of type float")
    if kind != "float" and (kind != "int" or layout in (NVFP4, MXFP4, MXFP8)):
        raise weights.refusal("type", "int or float, and float for this format")
    if layout in (NVFP4, MXFP4) and weights.raw.get("symmetric", True) is not True:
        raise weights.refusal("symmetric", "true for this format")
    return Scheme(_read_targets(group), str(layout), bits, _read_block(weights, layout))


def _read_targets(group: ConfigFields) -> tuple[str, ...]:
    """Raises ConfigError for a pattern that is none: it would match no module."""
    targets = group.words("targets")
    for pattern in (target[3:] for target in targets if target.startswith("re:")):
        try:
            re.compile(pattern)
        except re.error:
            raise group.refusal("targets", "names of modules, or re: and a pattern") from None
    return targets


def _read_block(weights: ConfigFields, layout: str) -> ScaleBlock:
    match weights.raw.get("strategy"), weights.raw.get("block_structure"):
        case "tensor", _:
            return PER_TENSOR
        case "channel", _:
            return PER_ROW
        case "tensor_group", _ if layout == NVFP4:
            return ScaleBlock(1, weights.whole("group_size"))
        case "group", _:
            return ScaleBlock(1, weights.whole("group_size"))
        case "block", [int(rows), int(columns)] if rows > 0 and columns > 0:
            return ScaleBlock(rows, columns)
    raise weights.refusal(
        "strategy",
        "tensor, channel, group, block with a block_structure, or for NVFP4 tensor_group",
    )
