"""The choices of a model in a forward, the best k of some scores, and whether each was clear.

A choice is the only step of a forward that is not continuous. If the last chosen score and the
first rejected one differ by rounding only, float32 may choose differently from float64 and be just
as right. Results after such a place are not compared. Exact ties go to the lower index, as in our
kernels; torch leaves them open.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

MARGIN = 1e-5
"""The error allowed to float32, relative to the largest score of a row; the real one is about 1e-6.
"""

MASKED = -1e30


class Choices(TorchFunctionMode):
    """Follows the choices of one forward over a prompt of `num_tokens`.

    In Qwen 4 a token chooses alone among the blocks of `block_len` that end up to it.
    """

    def __init__(self, num_tokens: int, block_len: int = 0) -> None:
        super().__init__()
        self.block_len = block_len
        self.clear = torch.ones(num_tokens, dtype=torch.bool)
        self._near_zero = torch.zeros(num_tokens, dtype=torch.bool)

    @property
    def num_clear(self) -> int:
        """How many tokens come before the first whose choice was not clear."""
        return int(self.clear.int().cumprod(0).sum())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.relu:
            self._note_near_zero(args[0])
        if func in (torch.topk, Tensor.topk):
            return self._choose(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _choose(self, scores: Tensor, k: int, dim: int = -1, sorted: bool = True) -> Any:
        assert dim in (-1, scores.ndim - 1), dim
        values, indices = scores.sort(dim=-1, descending=True, stable=True)
        rows = values.flatten(0, -2) if values.ndim > 1 else values[None]
        if self.block_len and values.ndim == 1 and k < len(values):
            # The first token that sees so many blocks stands for all that do.
            first = len(values) * self.block_len - 1
            self.clear[first] &= self._are_clear(rows, k)[0]
        elif k < rows.shape[1] and len(rows) % len(self.clear) == 0:
            # Each head chooses for itself where scores are [1, heads, tokens, …].
            for head in torch.split(rows, len(self.clear)):
                self._note(head, k)
        return torch.return_types.topk((values[..., :k], indices[..., :k]))

    def _note(self, rows: Tensor, k: int) -> None:
        self.clear &= self._are_clear(rows, k)

    def _are_clear(self, rows: Tensor, k: int) -> Tensor:
        """Whether the choice of the first k is clear, for each of `rows`, which fall."""
        last, first_left = rows[:, k - 1], rows[:, k]
        # A score of infinity is that of a place that is always chosen.
        largest = rows.abs().masked_fill((rows < MASKED) | (rows == torch.inf), 0).amax(1)
        is_clear = last - first_left > MARGIN * largest
        # Scores that no head wants are zero in float32 too, if they are not by a hair.
        near_zero = self._near_zero if len(rows) == len(self._near_zero) else False
        is_clear |= (last == 0) & (first_left == 0) & ~torch.as_tensor(near_zero)
        return is_clear | (first_left < MASKED)

    def _note_near_zero(self, products: Tensor) -> None:
        """`products` [1, tokens, heads, keys], of which relu makes scores."""
        if products.ndim == 4 and products.shape[1] == len(self.clear) and products.numel():
            sizes = products[0].abs()
            self._near_zero = (sizes < MARGIN * sizes.amax((1, 2), keepdim=True)).any(2).any(1)
