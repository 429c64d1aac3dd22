"""Activations of single numbers.

    sigmoid(x)   = 1 / (1 + exp(-x))
    silu(x)      = x · sigmoid(x)
    softplus(x)  = log(1 + exp(x));  above 20 x itself
    gelu(x)      = x · (1 + erf(x / √2)) / 2
    gelu_tanh(x) = x · (1 + tanh(√(2/π) · (x + 0.044715·x³))) / 2      ("gelu_pytorch_tanh")

Computed in float32 (float64 for float64) and rounded once. On a CPU a number's bits follow from
that number alone: not from its place in the tensor, nor from the tensor's size, nor from threads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ferryman_kernels._precision import wide_dtype
from ferryman_kernels.cpu._compiled import serves
from ferryman_kernels.elementwise._activations_compiled import activation_compiled

_OF_TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "softplus": F.softplus,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def _activation(name: str, x: Tensor) -> Tensor:
    # The first question, as in every launcher.
    has_loop = not x.is_cuda and serves(x)
    return activation_compiled(name, x) if has_loop else _OF_TORCH[name](x)


def sigmoid(x: Tensor) -> Tensor:
    """A new tensor of x's shape and dtype, as of all functions here."""
    return _activation("sigmoid", x)


def silu(x: Tensor) -> Tensor:
    return _activation("silu", x)


def softplus(x: Tensor) -> Tensor:
    return _activation("softplus", x)


def gelu(x: Tensor) -> Tensor:
    if x.is_cuda or not x.is_cpu:
        return F.gelu(x)
    # Unlike its gelu, torch's erf has the same bits in the middle of a tensor and at its end.
    wide = x.to(wide_dtype(x.dtype))
    shares: Tensor = (wide * 0.5**0.5).erf_().add_(1)
    return shares.mul_(wide * 0.5).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    return _activation("gelu_tanh", x)
