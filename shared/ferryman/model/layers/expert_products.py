"""One product with the experts that each token chose, as a part of another layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ferryman.model.layers.expert_stacks import ExpertStacks
from ferryman.model.layers.experts import ExpertProduct, present_experts, stacked_product
from ferryman.model.weights.linear import Linear, is_card
from ferryman.model.weights.matrix import Matrix
from ferryman_kernels.products.grouped_product import (
    CodeStack,
    FloatStack,
    grouped_product,
    sort_pairs,
)


@dataclass(frozen=True, slots=True)
class SeparateProducts:
    """One product for each expert present in the batch, over all of its rows."""

    experts: tuple[Linear, ...]
    out_dim: int

    def __call__(self, x: Tensor, chosen: Tensor) -> Tensor:
        per_row = chosen.shape[1]
        y = x.new_empty(chosen.numel(), self.out_dim)
        for expert, pairs in present_experts(self.experts, chosen):
            y[pairs] = expert(x[pairs // per_row])
        return y


@dataclass(frozen=True, slots=True)
class GroupedProduct:
    """All pairs in one grouped product, without a wait for the device."""

    stack: FloatStack | CodeStack
    product: Callable[[Tensor, FloatStack | CodeStack, Tensor, Tensor], Tensor]

    def __call__(self, x: Tensor, chosen: Tensor) -> Tensor:
        order, starts = sort_pairs(chosen, self.stack.shape[0])
        return self.product(x, self.stack, order, starts)


def load_expert_product(device: torch.device, matrices: Sequence[Matrix]) -> ExpertProduct:
    """The product with one of `matrices`, all of one shape, in the form that is fastest on
    `device`. Raises ConfigError on a card if their formats differ."""
    if is_card(device):
        stacks = ExpertStacks(len(matrices))
        for matrix in matrices:
            stacks.add([matrix])
        (only,) = stacks.made([])
        return GroupedProduct(only, grouped_product)
    linears = [matrix.linear(None) for matrix in matrices]
    return stacked_product(linears) or SeparateProducts(tuple(linears), matrices[0].shape[0])
