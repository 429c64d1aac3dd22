"""A weight whose inputs are multiplied by a factor each before the product (SmoothQuant, AWQ).

    y = weight · (factor ∘ x)

A tool divided the weight's columns by the factors before it made codes of them, so that columns of
large inputs lose less. The factors could be put into the numbers of a weight, but not into codes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ferryman.model.weights.linear import Linear
from ferryman.model.weights.matrix import Matrix


@dataclass(frozen=True, slots=True)
class SmoothedMatrix:
    """`factors` [columns] of each input of `matrix`, in the model's dtype and on its device."""

    matrix: Matrix
    factors: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.shape

    @property
    def kind(self) -> Hashable:
        # Shapes alone are counted on the meta device, where factors have no bytes to compare.
        numbers = b"" if self.factors.is_meta else self.factors.double().cpu().numpy().tobytes()
        return SmoothedMatrix, self.matrix.kind, numbers

    def narrow(self, axis: int, start: int, length: int) -> SmoothedMatrix:
        factors = self.factors[start : start + length] if axis else self.factors
        return SmoothedMatrix(self.matrix.narrow(axis, start, length), factors)

    def with_rows(self, rows: Tensor) -> SmoothedMatrix:
        return replace(self, matrix=self.matrix.with_rows(rows))

    def above(self, others: Sequence[Matrix]) -> SmoothedMatrix:
        below = [other.matrix for other in others if isinstance(other, SmoothedMatrix)]
        return replace(self, matrix=self.matrix.above(below))

    def scaled(self, factor: Tensor) -> SmoothedMatrix:
        return replace(self, matrix=self.matrix.scaled(factor))

    def dequantised(self) -> Tensor:
        numbers = self.matrix.dequantised()
        return numbers * self.factors.to(numbers.device)

    def linear(self, bias: Tensor | None) -> Linear:
        return SmoothedLinear(self.matrix.linear(bias), self.factors.clone())


@dataclass(frozen=True, slots=True)
class SmoothedLinear:
    """The product of inputs that are multiplied by `factors` [in_dim] first, in the model's
    dtype, as the tool's kernels do."""

    product: Linear
    factors: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x * self.factors)
