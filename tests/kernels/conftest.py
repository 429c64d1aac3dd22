"""Fresh memory is full of NaN. Without a GPU, tests/conftest.py chooses Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture
def device() -> torch.device:
    """The device of Triton kernels: a GPU if there is one, else the CPU with the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(20261120)


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills new tensors with NaN, so that a missing store cannot look like a zero."""

    def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocated(*args: Any, **kwargs: Any) -> Tensor:
            tensor = allocate(*args, **kwargs)
            return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor.fill_(77)

        return allocated

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
