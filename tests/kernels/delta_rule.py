"""Random inputs of the gated delta rule, and the rule itself token by token in float64."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
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


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


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
    """A strided view into wider rows, like a section of a slot."""
    num = heads.v_heads * heads.k_dim * heads.v_dim
    rows = torch.randn(slots, num + 8, dtype=wide(dtype))
    return rows[:, 8:].view(slots, *heads.state_shape)


def recurrence(inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Outputs of one request, and its state before each token and after the last."""
    q, k, v, g, beta = (tensor.double() for tensor in inputs.tensors())
    per_key, state = v.shape[1] // k.shape[1], state.double()
    out, seen = torch.zeros_like(v), [state]
    for t in range(len(v)):
        query, key = (rows[t].repeat_interleave(per_key, 0) for rows in (q, k))
        decayed = g[t].exp()[:, None, None] * state
        error = v[t] - torch.einsum("hk,hkv->hv", key, decayed)
        state = decayed + torch.einsum("hk,h,hv->hkv", key, beta[t], error)
        out[t] = torch.einsum("hk,hkv->hv", query, state)
        seen.append(state)
    return out, seen
