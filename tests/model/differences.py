"""The difference of logits from the right ones."""

from __future__ import annotations

from torch import Tensor


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference relative to the largest logit of its position."""
    assert found.shape == expected.shape
    scale = expected.abs().amax(-1, keepdim=True)
    return float(((found.double() - expected) / scale).abs().max())
