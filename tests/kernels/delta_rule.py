"""Random inputs of the gated delta rule."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from tests.kernels.oracles import delta_rule, strided_states, through, wide
from torch import Tensor
from torch.nn import functional as F

CPU = torch.device("cpu")


@dataclass(frozen=True)
class DeltaInputs:
    """All inputs except the states, in the form that both ops take."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def tensors(self, place: torch.device = CPU) -> list[Tensor]:
        return [getattr(self, field.name).to(place) for field in fields(self)]

    def part(self, low: int, high: int) -> DeltaInputs:
        return DeltaInputs(*(tensor[low:high] for tensor in self.tensors()))


@dataclass(frozen=True)
class Heads:
    k_heads: int = 2
    v_heads: int = 4
    k_dim: int = 16
    v_dim: int = 8

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.v_heads, self.k_dim, self.v_dim


def random_inputs(tokens: int, dtype: torch.dtype, heads: Heads) -> DeltaInputs:
    keys = torch.randn(2, tokens, heads.k_heads, heads.k_dim, dtype=wide(dtype))
    q, k = F.normalize(keys, dim=-1).to(dtype)
    return DeltaInputs(
        q=q,
        k=k,
        v=torch.randn(tokens, heads.v_heads, heads.v_dim).to(dtype),
        g=-torch.rand(tokens, heads.v_heads, dtype=wide(dtype)),
        beta=torch.rand(tokens, heads.v_heads, dtype=wide(dtype)),
    )


def random_states(slots: int, dtype: torch.dtype, heads: Heads) -> Tensor:
    return strided_states(slots, heads.state_shape, wide(dtype))


def recurrence(inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Outputs of one request, and its state before each token and after the last."""
    return through(delta_rule(inputs.tensors()), range(len(inputs.v)), state)
