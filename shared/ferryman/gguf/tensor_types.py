"""The types of tensors in a GGUF file: a row is cut into blocks, a block has so many bytes.

Numbers and sizes are those of ggml (`ggml_type` in ggml.h, `GGML_QUANT_SIZES` in gguf-py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_SUPER_BLOCK = 256


@dataclass(frozen=True, slots=True)
class TensorType:
    """`block_len` numbers of a row are stored in `block_bytes` bytes."""

    name: str
    block_len: int
    block_bytes: int

    @property
    def is_quantised(self) -> bool:
        """Whether several numbers share a scale."""
        return self.block_len > 1


_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", _SUPER_BLOCK, 84),
    11: TensorType("Q3_K", _SUPER_BLOCK, 110),
    12: TensorType("Q4_K", _SUPER_BLOCK, 144),
    13: TensorType("Q5_K", _SUPER_BLOCK, 176),
    14: TensorType("Q6_K", _SUPER_BLOCK, 210),
    20: TensorType("IQ4_NL", 32, 18),
    23: TensorType("IQ4_XS", _SUPER_BLOCK, 136),
    26: TensorType("I32", 1, 4),
    27: TensorType("I64", 1, 8),
    28: TensorType("F64", 1, 8),
    30: TensorType("BF16", 1, 2),
    39: TensorType("MXFP4", 32, 17),
}
TENSOR_TYPES: Mapping[int, TensorType] = _TYPES
"""The types that are read, by ggml's number."""

TYPE_NAMES: Mapping[str, TensorType] = {kind.name: kind for kind in _TYPES.values()}

# Types with a nearest one that is read, for the refusal's advice.
_REFUSED = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    29: "IQ1_M",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    34: "TQ1_0",
    35: "TQ2_0",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
    40: "NVFP4",
    41: "Q1_0",
}
_NEAREST = {
    "IQ1": "Q2_K",
    "IQ2": "Q2_K",
    "IQ3": "Q3_K",
    "IQ4": "IQ4_NL",
    "Q4": "Q4_0",
    "Q8": "Q8_0",
}


def refused_type(number: int) -> str:
    """A type that is not read, for an error: its name, and the nearest one that is."""
    name = _REFUSED.get(number)
    if name is None:
        return f"type number {number}, which ggml does not have as of this version"
    nearest = next((near for start, near in _NEAREST.items() if name.startswith(start)), None)
    return f"type {name}; the nearest that is read is {nearest}" if nearest else f"type {name}"
