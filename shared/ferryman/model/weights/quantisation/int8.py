"""int8 weights of a model that is stored in floats: `--quantize int8`.

    scale[i]   = max |w[i, :]| / 127              one for each output
    code[i, j] = w[i, j] / scale[i], rounded to the nearest, halves to even

Weights of linear layers alone: embeddings, the head, norms, convolutions and routers stay in the
model's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ferryman.model.weights.matrix import Matrix
from ferryman.model.weights.named_weights import Weights, accumulation_dtype
from ferryman.model.weights.quantisation.codes import ByteCodes
from ferryman.model.weights.quantisation.quantised_matrix import QuantisedMatrix, even_groups

INT8 = "int8"
LARGEST = 127


@dataclass(frozen=True, slots=True)
class Int8AtLoad:
    """Every weight of a linear layer becomes int8 when it is loaded."""

    def in_codes(self, weights: Weights, name: str, rows: int, columns: int) -> Matrix | None:
        return None

    def of_floats(self, weight: Tensor, dtype: torch.dtype, device: torch.device) -> Matrix:
        wide = weight.to(accumulation_dtype(dtype))
        largest = wide.abs().amax(dim=1, keepdim=True)
        # A row of zeros has any scale.
        scales = torch.where(largest > 0, largest, torch.ones_like(largest)) / LARGEST
        codes = (wide / scales).round_().to(torch.int8)
        groups = even_groups(weight.shape[1], weight.shape[1])
        return QuantisedMatrix(ByteCodes(codes), scales, groups, None, dtype, device)
