"""AWQ (Lin et al. 2023) in the layout "gemm": integers of 4 bits, packed along the outputs.

    value[i, j] = (q[i, j] - zero[g, i]) · scale[g, i]                 g = j // group_size

    qweight [columns, rows / 8]    qzeros [groups, rows / 8]    scales [groups, rows]

A word holds eight outputs, the even ones first.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.weights.matrix import Matrix
from ferryman.model.weights.named_weights import STORED_FLOATS, WeightFormat, Weights
from ferryman.model.weights.quantisation.codes import (
    middle,
    num_words,
    signed_codes,
    unpacked_words,
    zeros_or_none,
)
from ferryman.model.weights.quantisation.gptq import read_group_len
from ferryman.model.weights.quantisation.quantised_matrix import QuantisedMatrix, even_groups

_BITS = 4
_WORDS = ("I32",)
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place of each of eight outputs in their word."""


@dataclass(frozen=True, slots=True)
class Awq(WeightFormat):
    """`group_len` is 0 if a row has one scale."""

    group_len: int

    def in_codes(self, weights: Weights, name: str, rows: int, columns: int) -> Matrix | None:
        module = name.removesuffix(".weight")
        if not weights.has(f"{module}.qweight"):
            return None
        num_groups = -(-columns // (self.group_len or columns))
        packed = weights.stored(f"{module}.qweight", (columns, num_words(rows, _BITS)), _WORDS)
        zeros = weights.stored(f"{module}.qzeros", (num_groups, num_words(rows, _BITS)), _WORDS)
        scales = weights.stored(f"{module}.scales", (num_groups, rows), STORED_FLOATS)
        return QuantisedMatrix(
            signed_codes(_in_order(packed, rows).T, _BITS),
            scales.T,
            even_groups(columns, self.group_len or columns),
            zeros_or_none(_in_order(zeros, rows).T - middle(_BITS)),
            weights.dtype,
            weights.device,
        )


def _in_order(packed: Tensor, rows: int) -> Tensor:
    """[…, rows] from words [..., rows / 8]."""
    eights = unpacked_words(packed, _BITS, 8 * packed.shape[-1]).view(*packed.shape, 8)
    ordered: Tensor = eights[..., list(_PLACES)].flatten(-2)[..., :rows]
    return ordered


def read_awq(fields: ConfigFields) -> Awq:
    """`quant_method` awq. Raises ConfigError, by field name, for other layouts than "gemm"."""
    bits = "bits" if "bits" in fields.raw else "w_bit"
    if fields.whole(bits) != _BITS:
        raise fields.refusal(bits, str(_BITS))
    if str(fields.raw.get("version", "gemm")).lower() != "gemm":
        raise fields.refusal("version", "'gemm'")
    return Awq(
        read_group_len(fields, "group_size" if "group_size" in fields.raw else "q_group_size")
    )
