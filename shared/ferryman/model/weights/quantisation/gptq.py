"""GPTQ (Frantar et al. 2022): integers of 4 or 8 bits in words of 32, packed along the inputs.

    value[i, j] = (q[i, j] - zero[g, i]) · scale[g, i]              g = g_idx[j]

    qweight [columns · bits / 32, rows]  qzeros [groups, rows · bits / 32]  scales [groups, rows]

`checkpoint_format` gptq stores each zero less one, gptq_v2 as it is. With `desc_act` columns were
quantised in another order than they stand in, and `g_idx` names the group of each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.weights.matrix import Matrix
from ferryman.model.weights.named_weights import STORED_FLOATS, WeightFormat, Weights
from ferryman.model.weights.quantisation.codes import (
    PACKED_BITS,
    middle,
    num_words,
    signed_codes,
    unpacked_words,
    zeros_or_none,
)
from ferryman.model.weights.quantisation.quantised_matrix import QuantisedMatrix, even_groups

_WORDS = ("I32",)
_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}


@dataclass(frozen=True, slots=True)
class Gptq(WeightFormat):
    """`group_len` is 0 if a row has one scale; `zero_offset` is added to stored zeros."""

    bits: int
    group_len: int
    zero_offset: int

    def in_codes(self, weights: Weights, name: str, rows: int, columns: int) -> Matrix | None:
        module = name.removesuffix(".weight")
        if not weights.has(f"{module}.qweight"):
            return None
        bits, num_groups = self.bits, -(-columns // (self.group_len or columns))
        packed = weights.stored(f"{module}.qweight", (num_words(columns, bits), rows), _WORDS)
        shape = (num_groups, num_words(rows, bits))
        zeros = unpacked_words(weights.stored(f"{module}.qzeros", shape, _WORDS), bits, rows)
        scales = weights.stored(f"{module}.scales", (num_groups, rows), STORED_FLOATS)
        return QuantisedMatrix(
            signed_codes(unpacked_words(packed.T, bits, columns), bits),
            scales.T,
            self._groups(weights, module, columns),
            zeros_or_none(zeros.T + (self.zero_offset - middle(bits))),
            weights.dtype,
            weights.device,
        )

    def _groups(self, weights: Weights, module: str, columns: int) -> Tensor:
        if not weights.has(f"{module}.g_idx"):
            return even_groups(columns, self.group_len or columns)
        stored = weights.stored(f"{module}.g_idx", (columns,), _WORDS)
        if stored.is_meta:
            return even_groups(columns, self.group_len or columns)
        return stored.to(torch.int64)


def read_gptq(fields: ConfigFields) -> Gptq:
    """`quant_method` gptq. Raises ConfigError, by field name, for layouts of single kernels."""
    bits, layout = fields.whole("bits"), fields.raw.get("checkpoint_format") or "gptq"
    if bits not in PACKED_BITS:
        raise fields.refusal("bits", "4 or 8")
    if layout not in tuple(_ZERO_OFFSETS):
        raise fields.refusal("checkpoint_format", " or ".join(_ZERO_OFFSETS))
    if fields.raw.get("is_marlin_format"):
        raise fields.refusal("is_marlin_format", "false")
    # "-:…" leaves modules out, which the tensors say as well.
    if any(not rule.startswith("-:") for rule in fields.inner("dynamic").raw):
        raise fields.refusal("dynamic", "such that modules are left out, but none has other bits")
    return Gptq(bits, read_group_len(fields, "group_size"), _ZERO_OFFSETS[layout])


def read_group_len(fields: ConfigFields, name: str) -> int:
    """The columns that share a scale; -1 stands for all of them, 0 here."""
    return 0 if fields.raw.get(name) == -1 else fields.whole(name)
