"""Linear layers: y = x · weightᵀ + bias, in the form that the device multiplies fastest.

On a CPU with AVX-512 one loop multiplies float32 and bfloat16 for any number of tokens, by panels
that are packed at load (`packed_product`): a token's bits do not depend on the others. Without
AVX-512 oneDNN takes its weights in blocks. Packing them once at load, instead of at every call, is
faster than F.linear by these factors (torch 2.13, 2 cores with AVX-512 and bf16, weights of 5 to
50 MB):

    batch          1           8          32         512
    float32     1.7–1.8    2.2–3.2     1.7–2.8      1.25
    bfloat16    1.3–1.7    1.9–2.2        1.4       1.06

A call of oneDNN costs about 14 µs beyond the product, one of torch's float32 product 2 µs, one of
the loop 6 µs (docs/kernels.md has the times). A float32 weight that stays in the cache (up to
256 × 256) is not packed for oneDNN.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ferryman.model.shapes.ranks import Group
from ferryman_kernels.products.packed_product import (
    Panels,
    pack_panels,
    packed_product,
    reads_panels,
    shape_of_panels,
)

CARD_SHAPES = torch.device("meta", 1)
"""The place of weights that are counted for a card. Tensors have no bytes there, as on "meta",
where those of a processor are counted."""

# The least weight, in bytes, that is worth packing for oneDNN (measured as above, November 2026).
_PACKED_FROM_BYTES = {torch.float32: 256 * 1024, torch.bfloat16: 0}


class Linear(Protocol):
    """Multiplies x [tokens, in_dim] to [tokens, out_dim]."""

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """torch's own product; `weight` [out_dim, in_dim], `bias` [out_dim] or None.

    A token's bits may depend on the number of tokens.
    """

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """oneDNN's product with `weight` already in its blocked layout.

    A token's bits may depend on the number of tokens.
    """

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y


@dataclass(frozen=True, slots=True)
class PanelLinear:
    """Our loop's product; `bias` [out_dim], or [0] if there is none.

    A token's bits depend on the token and the weight alone.
    """

    panels: Panels
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return packed_product(x, self.panels, self.bias)


def is_processor(device: torch.device) -> bool:
    """Whether weights take the form that a processor multiplies; also where they are counted."""
    return device.type == "cpu" or device == torch.device("meta")


def is_card(device: torch.device) -> bool:
    """Whether weights take the form that a card multiplies; also where they are counted."""
    return device.type == "cuda" or device == CARD_SHAPES


def pack(weight: Tensor, bias: Tensor | None = None) -> PackedLinear | PanelLinear:
    """`weight` [out_dim, in_dim] on a CPU, copied into panels, or where no loop reads them into
    oneDNN's layout."""
    if reads_panels(weight.dtype):
        added = weight.new_empty(0) if bias is None else bias.contiguous()
        return PanelLinear(pack_panels(weight), added)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return PackedLinear(packed, bias)


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The fastest linear for the device, dtype and size of `weight` [out_dim, in_dim]."""
    if weight.device.type == "cpu" and packed_bytes(weight):
        return pack(weight, bias)
    return PlainLinear(weight, bias)


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


def packed_bytes(weight: Tensor) -> int:
    """The bytes of the copy that a CPU's linear makes of a weight of this size and dtype; 0 if it
    reads the weight itself."""
    if reads_panels(weight.dtype):
        out_dim, in_dim = weight.shape
        return prod(shape_of_panels(out_dim, in_dim, weight.dtype)) * weight.itemsize
    least_bytes = _PACKED_FROM_BYTES.get(weight.dtype)
    if least_bytes is None or weight.nbytes <= least_bytes:
        return 0
    is_there = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return weight.nbytes if is_there else 0
