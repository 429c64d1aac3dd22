"""The experts that a router chooses: on a CPU all in two compiled products, or one at a time where
their weights lie in neither panels nor blocks; on a card all in grouped products.

A CPU skips the experts that nothing was routed to, so it asks for the counts of a batch. On a card
that question is a wait for the device in every layer: there all experts' matrices lie in one stack,
and two grouped products compute every pair of a token and an expert, for any choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ferryman.model.layers.decoder_layers import FeedForward
from ferryman.model.layers.expert_stacks import ExpertStacks
from ferryman.model.weights.linear import Linear, PanelLinear, is_card
from ferryman.model.weights.matrix import Matrix, join_linear, joined_runs
from ferryman.model.weights.quantisation.gguf_matrix import BlockLinear
from ferryman_kernels.products.blocks.grouped_blocks import BlockStack, grouped_blocks, stack_blocks
from ferryman_kernels.products.grouped_product import (
    CodeStack,
    FloatStack,
    grouped_product,
    sort_pairs,
)
from ferryman_kernels.products.packed_product import (
    PanelStack,
    packed_grouped_product,
    stack_panels,
)
from ferryman_kernels.products.weighted_sum import weighted_sum

Activation = Callable[[Tensor], Tensor]
"""An expert's first product [rows, first_dim] becomes the input of its second [rows, inner_dim]."""

E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """A rank's part of an expert: matrices whose outputs stand side by side, then one after the
    activation, each with its bias or None."""

    first: Sequence[Matrix]
    down: Matrix
    bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Expert:
    """down(act(first(x)))."""

    first: Linear
    act: Activation
    down: Linear

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.down(self.act(self.first(hidden)))


class Weighing(Protocol):
    """The place of a token's shares in its experts' sum."""

    def fed(self, expert: FeedForward, hidden: Tensor, shares: Tensor) -> Tensor:
        """One expert's summand for hidden [tokens, hidden_dim], with `shares` [tokens, 1]."""
        ...

    def entering(self, hidden: Tensor, shares: Tensor) -> Tensor:
        """The experts' inputs, a row for each token or for each of its pairs; `shares` [tokens,
        experts_per_token]."""
        ...

    def leaving(self, outputs: Tensor, shares: Tensor) -> Tensor:
        """The sum [tokens, hidden_dim] of outputs [tokens, experts_per_token, hidden_dim]."""
        ...


class ShareOfOutput:
    """Σ share · expert(x)."""

    def fed(self, expert: FeedForward, hidden: Tensor, shares: Tensor) -> Tensor:
        return expert(hidden) * shares

    def entering(self, hidden: Tensor, shares: Tensor) -> Tensor:
        return hidden

    def leaving(self, outputs: Tensor, shares: Tensor) -> Tensor:
        return weighted_sum(outputs, shares)


class ShareOfInput:
    """Σ expert(share · x) (Llama 4)."""

    def fed(self, expert: FeedForward, hidden: Tensor, shares: Tensor) -> Tensor:
        return expert(hidden * shares)

    def entering(self, hidden: Tensor, shares: Tensor) -> Tensor:
        return (hidden[:, None, :] * shares[:, :, None]).flatten(0, 1)

    def leaving(self, outputs: Tensor, shares: Tensor) -> Tensor:
        return weighted_sum(outputs, torch.ones_like(shares))


class RoutedExperts(Protocol):
    """The sum over `chosen` experts for hidden [tokens, hidden_dim]; shares, in hidden's dtype, and
    indices of experts are [tokens, experts_per_token]."""

    def __call__(self, hidden: Tensor, shares: Tensor, chosen: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class SeparateExperts:
    """One product for each expert present in the batch, over all of its tokens."""

    experts: tuple[FeedForward, ...]
    weighing: Weighing

    def __call__(self, hidden: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        per_token, pair_shares = chosen.shape[1], shares.flatten()
        mixed = torch.zeros_like(hidden)
        for expert, pairs in present_experts(self.experts, chosen):
            tokens = pairs // per_token
            fed = self.weighing.fed(expert, hidden[tokens], pair_shares[pairs, None])
            mixed.index_add_(0, tokens, fed)
        return mixed


def present_experts(experts: Sequence[E], chosen: Tensor) -> Iterator[tuple[E, Tensor]]:
    """Each expert that a row has chosen, in order, with the indices of its pairs among those of
    rows and experts that `chosen` [rows, per_row] names."""
    by_expert = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=len(experts)).tolist()
    for expert, pairs in zip(experts, by_expert.split_with_sizes(counts), strict=True):
        if len(pairs):
            yield expert, pairs


class ExpertProduct(Protocol):
    """The products [rows · per_row, out_dim] of x [rows, in_dim] with the experts `chosen` for each
    of its rows, int64 [rows, per_row]."""

    def __call__(self, x: Tensor, chosen: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class PanelProduct:
    """The product with weights in panels of floats."""

    stack: PanelStack

    def __call__(self, x: Tensor, chosen: Tensor) -> Tensor:
        return packed_grouped_product(x, self.stack, chosen)


@dataclass(frozen=True, slots=True)
class BlockProduct:
    """The product with weights in codes."""

    stack: BlockStack

    def __call__(self, x: Tensor, chosen: Tensor) -> Tensor:
        return grouped_blocks(x, self.stack, chosen)


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """All pairs of a token and an expert go through two compiled products.

    One at a time, each expert takes some ten small operations besides its products.
    """

    first: ExpertProduct
    act: Activation
    down: ExpertProduct
    weighing: Weighing

    def __call__(self, hidden: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        rows = self.weighing.entering(hidden, shares)
        experts = chosen if len(rows) == len(chosen) else chosen.view(-1, 1)
        inner = self.act(self.first(rows, experts))
        outputs = self.down(inner, chosen.view(-1, 1))
        return self.weighing.leaving(outputs.view(*chosen.shape, -1), shares)


@dataclass(frozen=True, slots=True)
class GroupedExperts:
    """All pairs in grouped products, without a wait for the device. The outputs of `first` stand
    side by side: one product, but for formats that cannot be joined."""

    first: tuple[FloatStack | CodeStack, ...]
    act: Activation
    down: FloatStack | CodeStack
    weighing: Weighing
    product: Callable[[Tensor, FloatStack | CodeStack, Tensor, Tensor], Tensor]

    def __call__(self, hidden: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        order, starts = sort_pairs(chosen, self.down.shape[0])
        rows = self.weighing.entering(hidden, shares)
        firsts = [self.product(rows, stack, order, starts) for stack in self.first]
        inner = self.act(firsts[0] if len(firsts) == 1 else torch.cat(firsts, dim=1))
        outputs = self.product(inner, self.down, order, starts)
        return self.weighing.leaving(outputs.view(*chosen.shape, -1), shares)


def load_experts_for(
    device: torch.device, parts: Iterable[ExpertMatrices], act: Activation, weighing: Weighing
) -> RoutedExperts:
    """The experts in the form that is fastest on `device`. Raises ConfigError on a card if the
    experts' formats differ."""
    if is_card(device):
        return grouped_experts(list(parts), act, weighing)
    experts = [
        Expert(join_linear(part.first, part.bias), act, part.down.linear(part.down_bias))
        for part in parts
    ]
    return _experts_on_cpu(experts, act, weighing)


def _experts_on_cpu(
    experts: Sequence[Expert], act: Activation, weighing: Weighing
) -> RoutedExperts:
    first = stacked_product([expert.first for expert in experts])
    down = stacked_product([expert.down for expert in experts])
    if first is None or down is None:
        return SeparateExperts(tuple(experts), weighing)
    return StackedExperts(first, act, down, weighing)


def stacked_product(linears: Sequence[Linear]) -> ExpertProduct | None:
    """One product of all experts, or None if there is none for their weights."""
    in_panels = [linear for linear in linears if isinstance(linear, PanelLinear)]
    if len(in_panels) == len(linears):
        biases = _biases([linear.bias for linear in in_panels])
        return PanelProduct(stack_panels([linear.panels for linear in in_panels], biases))
    in_blocks = [linear for linear in linears if isinstance(linear, BlockLinear)]
    if len(in_blocks) == len(linears) and len({linear.panels.form for linear in in_blocks}) == 1:
        biases = _biases([linear.bias for linear in in_blocks])
        return BlockProduct(stack_blocks([linear.panels for linear in in_blocks], biases))
    return None


def _biases(biases: Sequence[Tensor]) -> Tensor:
    """[experts, out_dim], or [1, 0] where each is [0]."""
    return torch.stack(list(biases)) if len(biases[0]) else biases[0][None]


def grouped_experts(
    parts: Sequence[ExpertMatrices], act: Activation, weighing: Weighing
) -> GroupedExperts:
    """Raises ConfigError if the experts' matrices do not have one format."""
    # Matrices are views of files until they are copied, so one expert at a time is joined.
    first = ExpertStacks(len(parts))
    for part in parts:
        first.add(joined_runs(part.first))
    down = ExpertStacks(len(parts))
    for part in parts:
        down.add([part.down])
    (only,) = down.made([part.down_bias for part in parts])
    firsts = first.made([part.bias for part in parts])
    return GroupedExperts(firsts, act, only, weighing, grouped_product)
