"""Linear layers: y = x · weightᵀ + bias, in the form that the device multiplies fastest.

On a CPU, oneDNN takes its weights in blocks. Packing them once at load, instead of at every call,
is faster than F.linear by these factors (torch 2.13, 2 cores with AVX-512 and bf16, weights of 5 to
50 MB):

    batch          1           8          32         512
    float32     1.7–1.8    2.2–3.2     1.7–2.8      1.25
    bfloat16    1.3–1.7    1.9–2.2        1.4       1.06

oneDNN has no float64. With few tokens it does not read a packed weight as fast as memory allows:
there a loop reads it instead (`packed_product`; docs/kernels.md has the times).

A call of oneDNN costs about 14 µs beyond the product, one of torch's float32 product 2 µs. A
float32 weight that stays in the cache (up to 256 × 256) is faster unpacked, up to 5 times at batch
1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ferryman.model.shapes.ranks import Group
from ferryman_kernels.cpu._lanes import HAS_DOTS
from ferryman_kernels.products.packed_product import Panels, packed_product, panels_of

# The least weight, in bytes, that is worth packing (measured as above, November 2026).
_PACKED_FROM_BYTES = {torch.float32: 256 * 1024, torch.bfloat16: 0}
# The most tokens that the loop over a packed weight multiplies faster than oneDNN (Zen 4, with one
# thread and two): up to these it reads while it multiplies. Without the processor's product of
# pairs, bfloat16 is widened first.
FEW_TOKENS = {torch.float32: 32, torch.bfloat16: 32 if HAS_DOTS else 4}


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


@dataclass(frozen=True, slots=True)
class PanelLinear:
    """oneDNN's product for many tokens; for few a loop reads the same memory.

    `bias` [out_dim], or [0] if there is none. `few_tokens` are the most for the loop, with any
    number of threads: its sums do not depend on it. The number of tokens in a batch may change a
    token's last bits, as it does within oneDNN.
    """

    panels: Panels
    bias: Tensor
    many: PackedLinear
    few_tokens: int

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] <= self.few_tokens:
            return packed_product(x, self.panels, self.bias)
        return self.many(x)


def pack(weight: Tensor, bias: Tensor | None = None) -> PackedLinear | PanelLinear:
    """`weight` [out_dim, in_dim] on a CPU, copied into oneDNN's layout."""
    weight = weight.contiguous()
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    many, panels = PackedLinear(packed, bias), panels_of(packed, weight)
    if panels is None:
        return many
    added = weight.new_empty(0) if bias is None else bias.contiguous()
    return PanelLinear(panels, added, many, FEW_TOKENS[weight.dtype])


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The fastest linear for the device, dtype and size of `weight` [out_dim, in_dim]."""
    return pack(weight, bias) if _is_worth_packing(weight) else PlainLinear(weight, bias)


@dataclass(frozen=True, slots=True)
class SummedLinear:
    """A product whose in_dim is divided among the ranks: the sum of their partial products."""

    part: Linear
    group: Group

    def __call__(self, x: Tensor) -> Tensor:
        return self.group.summed(self.part(x))


@dataclass(frozen=True, slots=True)
class StackedLinear:
    """Products of the same x whose outputs are joined side by side."""

    parts: tuple[Linear, ...]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


@dataclass(frozen=True, slots=True)
class JoinedLinear:
    """A product whose out_dim is divided among the ranks; the last part is padded with zeros."""

    part: Linear
    out_dim: int
    group: Group

    def __call__(self, x: Tensor) -> Tensor:
        return self.group.joined(self.part(x))[:, : self.out_dim]


def padded_rows(weight: Tensor, group: Group) -> Tensor:
    """A rank's rows of `weight` [out_dim, in_dim], as many on each rank: zeros fill the last."""
    if group.num_ranks == 1:
        return weight
    length = -(-len(weight) // group.num_ranks)
    rows = weight[group.rank * length : (group.rank + 1) * length]
    return F.pad(rows, (0, 0, 0, length - len(rows)))


def make_joined(rows: Tensor, out_dim: int, group: Group, bias: Tensor | None = None) -> Linear:
    """A linear that gives all of out_dim to every rank; `rows` are this rank's `padded_rows`,
    `bias` [out_dim] is whole."""
    rank_bias = None if bias is None else padded_rows(bias[:, None], group)[:, 0]
    part = make_linear(rows, rank_bias)
    return part if group.num_ranks == 1 else JoinedLinear(part, out_dim, group)


def _is_worth_packing(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and is_packed_on_cpu(weight)


def is_packed_on_cpu(weight: Tensor) -> bool:
    """Whether a weight of this size and dtype is copied into oneDNN's layout when it runs on a
    CPU."""
    least_bytes = _PACKED_FROM_BYTES.get(weight.dtype)
    if least_bytes is None or weight.nbytes <= least_bytes:
        return False
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
