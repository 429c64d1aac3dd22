"""The description of a ragged batch for kernels: host integers, one span for each request."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

Span = tuple[int, int]
"""Absolute positions [start, end) of one request's tokens; the batch holds them back to back."""

SlotAt = tuple[int, int, int]
"""(request_index, position, dst_slot): write the state at an absolute position to a slot."""


def first_tokens(spans: Sequence[Span]) -> list[int]:
    """The start of each request's tokens in the batch, and after the last one its end."""
    return list(accumulate((end - start for start, end in spans), initial=0))


@lru_cache(maxsize=32)
def on_device(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Host integers as an int64 table on `device`, copied once for all layers of a step."""
    table = torch.tensor(rows, dtype=torch.int64, device="cpu")
    if device.type == "cuda":
        return table.pin_memory().to(device, non_blocking=True)
    return table
