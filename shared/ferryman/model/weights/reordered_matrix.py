"""A weight whose columns have another order in its codes than the model's inputs have.

    y[i] = Σ_j weight[i, order[j]] · x[j]

llama.cpp's converter moves the columns of Qwen3.5's `ssm_out` by value heads of 128. A block of 256
numbers shares a scale, so the columns cannot be moved back within the codes: the inputs are moved
instead, which changes no number.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ferryman.model.weights.linear import Linear
from ferryman.model.weights.matrix import Matrix


@dataclass(frozen=True, slots=True)
class ReorderedMatrix:
    """`order` [columns] int64, on the processor: the column of `matrix` for each input."""

    matrix: Matrix
    order: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.shape

    @property
    def kind(self) -> Hashable:
        return ReorderedMatrix, self.matrix.kind, self.order.numpy().tobytes()

    def narrow(self, axis: int, start: int, length: int) -> Matrix:
        """Some columns are read in floats: they are no neighbours in the codes."""
        if axis == 0:
            return replace(self, matrix=self.matrix.narrow(axis, start, length))
        assert length == self.shape[1], "a weight that ranks divide by columns is read in floats"
        return self

    def with_rows(self, rows: Tensor) -> ReorderedMatrix:
        return replace(self, matrix=self.matrix.with_rows(rows))

    def above(self, others: Sequence[Matrix]) -> ReorderedMatrix:
        below = [other.matrix for other in others if isinstance(other, ReorderedMatrix)]
        return replace(self, matrix=self.matrix.above(below))

    def scaled(self, factor: Tensor) -> ReorderedMatrix:
        return replace(self, matrix=self.matrix.scaled(factor))

    def dequantised(self) -> Tensor:
        numbers = self.matrix.dequantised()
        return numbers[:, self.order.to(numbers.device)]

    def linear(self, bias: Tensor | None) -> Linear:
        product = self.matrix.linear(bias)
        return ReorderedLinear(product, torch.argsort(self.order))


@dataclass(frozen=True, slots=True)
class ReorderedLinear:
    """The product of inputs [tokens, in_dim] that are taken in the order `inputs` [in_dim]."""

    product: Linear
    inputs: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x.index_select(1, self.inputs))
