"""The dtype in which a formula is computed."""

from __future__ import annotations

import torch


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays float64; everything narrower is computed and accumulated in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
