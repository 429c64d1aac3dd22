"""Launchers that take a card's ways for tensors of the processor, with Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from ferryman_kernels.elementwise import activations


@contextmanager
def on_a_card() -> Iterator[None]:
    """Inside the block tensors say that they are on a card. On a machine with a card they are.

    A card computes torch's functions of single numbers by one instruction after the other for each
    of them. The processor's have other bits at the end of a tensor; so they are rounded from
    float64 here.
    """
    with ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(patch.object(Tensor, "is_cuda", True, create=True))
            stack.enter_context(patch.object(Tensor, "is_cpu", False, create=True))
            for owner, name in ((F, "softplus"), (F, "silu"), (F, "gelu"), (Tensor, "sigmoid")):
                single = _of_single_numbers(getattr(owner, name))
                stack.enter_context(patch.object(owner, name, single))
            of_torch = {
                "sigmoid": _of_single_numbers(torch.sigmoid),
                "silu": F.silu,
                "softplus": F.softplus,
                "gelu_tanh": partial(F.gelu, approximate="tanh"),
            }
            stack.enter_context(patch.dict(activations._OF_TORCH, of_torch))
        yield


def _of_single_numbers(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def rounded(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return function(x.double(), *args, **kwargs).to(x.dtype)

    return rounded
