"""bitsandbytes: four bits by a table (NF4, FP4; QLoRA, Dettmers et al. 2023), and LLM.int8().

    4 bits    value[n] = table[code[n]] · absmax[n // blocksize]       n counts along all rows
    8 bits    value[i, j] = code[i, j] · SCB[i] / 127

    weight          U8 [half of all, 1], the even number in a byte's upper bits; I8 for 8 bits
    weight.absmax   F32, or with double quantisation U8, which stands for
                    nested_quant_map[absmax] · nested_absmax[block // nested_blocksize] + offset
    weight.quant_map                 the table, F32 [16]
    weight.quant_state.bitsandbytes__nf4    JSON: blocksize, shape, nested_blocksize, nested_offset
    SCB             the largest number of each row, F32

The numbers are those that the library dequantises to, before it rounds them to `dtype`. LLM.int8()
rounds inputs to 8 bits as well, but for outliers; here they stay in the model's dtype.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ferryman.errors import ConfigError
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.weights.matrix import Matrix
from ferryman.model.weights.named_weights import WeightFormat, Weights, accumulation_dtype
from ferryman.model.weights.quantisation.codes import ByteCodes, NibbleCodes, pack_nibbles
from ferryman.model.weights.quantisation.nibble_matrix import NibbleMatrix
from ferryman.model.weights.quantisation.quantised_matrix import QuantisedMatrix, even_groups

TYPES = ("nf4", "fp4")
_TABLE_LEN = 16
_LARGEST = 127
_BY_ROWS = 0


@dataclass(frozen=True, slots=True)
class BitsAndBytes(WeightFormat):
    """Modules that were left out are those with a weight in floats."""

    bits: int

    def in_codes(self, weights: Weights, name: str, rows: int, columns: int) -> Matrix | None:
        dtype = weights.header(name).dtype if weights.has(name) else ""
        if self.bits == 4 and dtype == "U8":
            return _four_bits(weights, name, (rows, columns))
        if self.bits == 8 and dtype == "I8":
            return _eight_bits(weights, name, (rows, columns))
        return None


def _eight_bits(weights: Weights, name: str, shape: tuple[int, int]) -> QuantisedMatrix:
    module = name.removesuffix(".weight")
    layout = f"{module}.weight_format"
    if weights.has(layout):
        number = weights.stored(layout, weights.header(layout).shape, ("U8",))
        if not number.is_meta and int(number) != _BY_ROWS:
            raise ConfigError(
                f"{weights.checkpoint.folder}: tensor {weights.prefix + layout!r} is "
                f"{int(number)}, a layout of single cards; save the model again with a newer "
                "bitsandbytes, which stores rows (0)"
            )
    codes = ByteCodes(weights.stored(name, shape, ("I8",)))
    largest = weights.stored(f"{module}.SCB", (shape[0],), ("F32",))
    scales = largest[:, None].to(accumulation_dtype(weights.dtype)) / _LARGEST
    groups = even_groups(shape[1], shape[1])
    return QuantisedMatrix(codes, scales, groups, None, weights.dtype, weights.device)


def _four_bits(weights: Weights, name: str, shape: tuple[int, int]) -> NibbleMatrix:
    (rows, columns), count = shape, math.prod(shape)
    packed = weights.stored(name, (-(-count // 2), 1), ("U8",))
    state = _read_state(weights, name, shape)
    # Blocks go on from row to row. Where they do not end with a row, a group is the longest part
    # that divides both, and a block's scale stands for several groups.
    length = math.gcd(state.block_len, columns)
    scales = _largest_numbers(weights, name, state, count).repeat_interleave(
        state.block_len // length
    )
    factors = torch.ones(1, 1, dtype=accumulation_dtype(weights.dtype), device=packed.device)
    return NibbleMatrix(
        _codes(packed, shape, _table(weights, name)),
        scales[: count // length].view(rows, columns // length),
        factors.expand(rows, 1),
        length,
        weights.dtype,
        weights.device,
    )


def _codes(packed: Tensor, shape: tuple[int, int], table: tuple[float, ...]) -> NibbleCodes:
    rows, columns = shape
    if columns % 2 == 0:
        return NibbleCodes((packed >> 4 | packed << 4).view(rows, columns // 2), columns, table)
    codes = torch.cat((packed >> 4, packed & 0x0F), dim=1).flatten()
    return pack_nibbles(codes[: rows * columns].view(rows, columns), table)


def _table(weights: Weights, name: str) -> tuple[float, ...]:
    stored = weights.stored(f"{name}.quant_map", (_TABLE_LEN,), ("F32",))
    if stored.is_meta:
        return (0.0,) * _TABLE_LEN
    if not bool(stored.isfinite().all()):
        full_name = f"{weights.prefix}{name}.quant_map"
        raise ConfigError(f"{weights.checkpoint.folder}: tensor {full_name!r} holds no numbers")
    return tuple(stored.tolist())


@dataclass(frozen=True, slots=True)
class _State:
    """`offset` and the length of the nested blocks are of double quantisation; without it 0."""

    block_len: int
    nested_len: int
    offset: float


def _largest_numbers(weights: Weights, name: str, state: _State, count: int) -> Tensor:
    """The largest number of each block in float32."""
    blocks = -(-count // state.block_len)
    if not state.nested_len:
        return weights.stored(f"{name}.absmax", (blocks,), ("F32",))
    codes = weights.stored(f"{name}.absmax", (blocks,), ("U8",))
    outer = -(-blocks // state.nested_len)
    scales = weights.stored(f"{name}.nested_absmax", (outer,), ("F32",))
    numbers = weights.stored(f"{name}.nested_quant_map", (256,), ("F32",))
    largest = numbers[codes.to(torch.int32)]
    # The library rounds the product to float32 before it adds.
    return largest * scales.repeat_interleave(state.nested_len)[:blocks] + state.offset


def _read_state(weights: Weights, name: str, shape: tuple[int, int]) -> _State:
    """Raises ConfigError unless the JSON of the weight's state says its shape and its type."""
    tensors = [f"{name}.quant_state.bitsandbytes__{kind}" for kind in TYPES]
    place = weights.first_of(*tensors)
    content = weights.stored(place, weights.header(place).shape, ("U8",))
    is_nested = weights.has(f"{name}.nested_absmax")
    if content.is_meta:
        return _state_of_shapes(weights, name, math.prod(shape), is_nested=is_nested)
    source = weights.checkpoint.folder / (weights.prefix + place)
    try:
        raw: Any = json.loads(bytes(content.tolist()))
    except ValueError as error:
        raise ConfigError(f"{source} cannot be read as JSON: {error}") from None
    fields = ConfigFields(source, raw if isinstance(raw, dict) else {})
    if fields.raw.get("shape") != list(shape):
        raise fields.refusal("shape", f"{list(shape)}, as config.json implies")
    if not is_nested:
        return _State(fields.whole("blocksize"), 0, 0.0)
    offset = fields.raw.get("nested_offset")
    if not isinstance(offset, float) or not math.isfinite(offset):
        raise fields.refusal("nested_offset", "a finite number")
    return _State(fields.whole("blocksize"), fields.whole("nested_blocksize"), offset)


def _state_of_shapes(weights: Weights, name: str, count: int, *, is_nested: bool) -> _State:
    """The same from the numbers of blocks, where nothing but headers is there to be read."""
    blocks = math.prod(weights.header(f"{name}.absmax").shape)
    if not is_nested:
        return _State(_power_of_two(count, blocks), 0, 0.0)
    outer = math.prod(weights.header(f"{name}.nested_absmax").shape)
    return _State(_power_of_two(count, blocks), _power_of_two(blocks, outer), 0.0)


def _power_of_two(count: int, blocks: int) -> int:
    """The least power of two that divides so many numbers into so many blocks."""
    length = 1
    while -(-count // length) > max(1, blocks):
        length *= 2
    return length


def read_bitsandbytes(fields: ConfigFields) -> BitsAndBytes:
    """`quant_method` bitsandbytes. Raises ConfigError, by field name, for what is not read."""
    if fields.flag("load_in_8bit", False) or fields.flag("_load_in_8bit", False):
        return BitsAndBytes(8)
    if not (fields.flag("load_in_4bit", False) or fields.flag("_load_in_4bit", False)):
        raise fields.refusal("load_in_4bit", "true, or load_in_8bit")
    if fields.raw.get("bnb_4bit_quant_type", TYPES[0]) not in TYPES:
        raise fields.refusal("bnb_4bit_quant_type", " or ".join(TYPES))
    storage = str(fields.raw.get("bnb_4bit_quant_storage") or "uint8")
    if storage.removeprefix("torch.") != "uint8":
        raise fields.refusal("bnb_4bit_quant_storage", "uint8; save the model again with it")
    return BitsAndBytes(4)
