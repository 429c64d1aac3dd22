"""Linear layers: y = x · weightᵀ + bias, in the form that the device multiplies fastest.

On a CPU, oneDNN wants its weights in blocks. Packed once at load instead of at every call
(torch 2.13, 2 cores with AVX-512 and bf16, weights larger than the cache, against F.linear):
float32 takes 1/2.1 of the time at batch 1, 1/3 at 8 and at 32, 1/1.25 at 512;
bfloat16 1/1.7, 1/2, 1/1.4 and 1/1.06. oneDNN has no float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

_PACKED_DTYPES = (torch.float32, torch.bfloat16)


class Linear(Protocol):
    """Multiplies x [tokens, in_dim] to [tokens, out_dim]."""

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """torch's own product; `weight` [out_dim, in_dim], `bias` [out_dim] or None."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """oneDNN's product with `weight` already in its blocked layout."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The quickest linear for where `weight` [out_dim, in_dim] lies and what it is made of."""
    is_packable = weight.device.type == "cpu" and weight.dtype in _PACKED_DTYPES
    if is_packable and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return PackedLinear(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()), bias)
    return PlainLinear(weight, bias)
