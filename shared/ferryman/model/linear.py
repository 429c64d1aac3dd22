"""Linear layers: y = x · weightᵀ + bias, in the form that the device multiplies fastest.

On a CPU, oneDNN wants its weights in blocks. Packed once at load instead of at every call, times
as quick as F.linear (torch 2.13, 2 cores with AVX-512 and bf16, weights of 5 to 50 MB):

    batch          1           8          32         512
    float32     1.7–1.8    2.2–3.2     1.7–2.8      1.25
    bfloat16    1.3–1.7    1.9–2.2        1.4       1.06

oneDNN has no float64.

A call of oneDNN costs about 14 µs beyond the product, one of torch's float32 product 2 µs: a
float32 weight that stays in the cache (up to 256 × 256) is quicker unpacked, up to 5 times at
batch 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ferryman.model.ranks import Group

# The least weight, in bytes, that is worth packing (measured as above, November 2026).
_PACKED_FROM_BYTES = {torch.float32: 256 * 1024, torch.bfloat16: 0}


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


def pack(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """`weight` [out_dim, in_dim] on a CPU, copied into oneDNN's layout."""
    return PackedLinear(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()), bias)


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The quickest linear for where `weight` [out_dim, in_dim] lies and what it is made of."""
    return pack(weight, bias) if _is_worth_packing(weight) else PlainLinear(weight, bias)


@dataclass(frozen=True, slots=True)
class SummedLinear:
    """A product whose in_dim is cut over the ranks: the sum of what each makes of its part."""

    part: Linear
    group: Group

    def __call__(self, x: Tensor) -> Tensor:
        return self.group.summed(self.part(x))


def make_summed(weight: Tensor, bias: Tensor | None, group: Group) -> Linear:
    """A linear of this rank's columns `weight` [out_dim, in_dim / ranks] and the whole `bias`."""
    if group.num_ranks == 1:
        return make_linear(weight, bias)
    return SummedLinear(make_linear(weight, bias if group.rank == 0 else None), group)


@dataclass(frozen=True, slots=True)
class JoinedLinear:
    """A product whose out_dim is cut over the ranks; the last part is filled up with zeros."""

    part: Linear
    out_dim: int
    group: Group

    def __call__(self, x: Tensor) -> Tensor:
        return self.group.joined(self.part(x))[:, : self.out_dim]


def make_joined(weight: Tensor, group: Group) -> Linear:
    """A linear that gives all of out_dim to every rank; `weight` [out_dim, in_dim] is whole."""
    if group.num_ranks == 1:
        return make_linear(weight)
    out_dim = weight.shape[0]
    length = -(-out_dim // group.num_ranks)
    rows = weight[group.rank * length : (group.rank + 1) * length]
    filled = F.pad(rows, (0, 0, 0, length - len(rows)))
    return JoinedLinear(make_linear(filled), out_dim, group)


def _is_worth_packing(weight: Tensor) -> bool:
    least_bytes = _PACKED_FROM_BYTES.get(weight.dtype)
    if weight.device.type != "cpu" or least_bytes is None or weight.nbytes <= least_bytes:
        return False
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
