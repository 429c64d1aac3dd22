"""Norms around the mean, with a bias or without.

y = (x - mean) / √(variance + eps) · weight (+ bias)             (Ba et al. 2016, LayerNorm)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from ferryman.model.shapes.ranks import share_of
from ferryman.model.weights.named_weights import Weights, accumulation_dtype


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """The norm of each row; `weight` and `bias` [dim], if any, in the accumulation dtype."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, hidden: Tensor) -> Tensor:
        normed = F.layer_norm(
            hidden.to(self.weight.dtype), self.weight.shape, self.weight, self.bias, self.eps
        )
        return normed.to(hidden.dtype)


@dataclass(frozen=True, slots=True)
class CentredHeads:
    """The norm of each head by weights of its own: `weight` [heads, head_dim]."""

    weight: Tensor
    eps: float

    def __call__(self, heads: Tensor) -> Tensor:
        """[tokens, heads, head_dim] in and out."""
        wide = heads.to(self.weight.dtype)
        normed = F.layer_norm(wide, self.weight.shape[1:], None, None, self.eps)
        return (normed * self.weight).to(heads.dtype)

    def ordered(self, channels: Tensor) -> CentredHeads:
        """The norm of heads whose `channels` were reordered like this."""
        return replace(self, weight=self.weight[:, channels.to(self.weight.device)])


def load_layer_norm(weights: Weights, name: str, dim: int, eps: float) -> LayerNorm:
    weight, bias = (weights.precise(f"{name}.{part}", dim) for part in ("weight", "bias"))
    return LayerNorm(weight, bias, eps)


def load_centred_norm(weights: Weights, name: str, dim: int, eps: float) -> LayerNorm:
    return LayerNorm(weights.precise(f"{name}.weight", dim), None, eps)


def load_plain_centred_norm(weights: Weights, name: str, dim: int, eps: float) -> LayerNorm:
    """The norm whose weights are one: nothing is read but the dtype and device of `weights`."""
    ones = torch.ones(dim, dtype=accumulation_dtype(weights.dtype), device=weights.device)
    return LayerNorm(ones, None, eps)


def load_centred_heads(
    weights: Weights, name: str, heads: int, head_dim: int, eps: float
) -> CentredHeads:
    """The norms of a rank's heads: each stored under its number (StableLM 2), or all in one tensor
    (Command R)."""
    if weights.has(f"{name}.weight"):
        joint = weights.precise(f"{name}.weight", heads, head_dim)
    else:
        parts = [weights.precise(f"{name}.norms.{head}.weight", head_dim) for head in range(heads)]
        joint = torch.stack(parts)
    return CentredHeads(share_of(joint, heads, weights.group), eps)
