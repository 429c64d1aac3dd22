"""The product with a quantised matrix whose codes lie in the order of panels (`packed_product`).

    value[p, s, o, j] = (code[p, s, o, j] - zero[p, g, o]) · scale[p, g, o]      g = group of column

Output 64·p + o has these numbers for input pair·s + j. So what a few panels of codes stand for are
panels already, and one loop multiplies any number of tokens by them in one order of sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from ferryman.model.weights.named_weights import accumulation_dtype
from ferryman.model.weights.quantisation.codes import Codes, copied, take_rows
from ferryman_kernels.products.packed_product import packed_product, panels_in, shape_of_panels

if TYPE_CHECKING:
    from ferryman.model.weights.quantisation.quantised_matrix import QuantisedMatrix


@dataclass(frozen=True, slots=True)
class CodedPanels:
    """`codes` [panels · steps, 64 · pair]; `scales` and `zeros` [panels, groups, 64], or no zeros.

    `groups` [inputs] int64 is each input's group, also of those that fill the last step; `even` is
    their length where groups of one length follow one another, or else 0. `shape` is that of all
    panels as numbers, in `dtype`.
    """

    codes: Codes
    scales: Tensor
    zeros: Tensor | None
    groups: Tensor
    even: int
    shape: tuple[int, int, int, int]
    dtype: torch.dtype

    def dequantised(self, first: int, end: int) -> Tensor:
        """The numbers of panels [first, end)."""
        _, steps, width, pair = self.shape
        wide = accumulation_dtype(self.dtype)
        values = self.codes.values(first * steps, end * steps, wide)
        if self.even:
            by_group = values.view(end - first, -1, self.even // pair, width * pair)
        else:
            by_group = values.view(end - first, steps, 1, width * pair)
        if self.zeros is not None:
            by_group.sub_(self._of_each(self.zeros[first:end], wide))
        by_group.mul_(self._of_each(self.scales[first:end], wide))
        return values.to(self.dtype).view(-1, *self.shape[1:])

    def _of_each(self, of_groups: Tensor, wide: torch.dtype) -> Tensor:
        """Each number's factor from `of_groups` [panels, groups, 64]: [panels, groups, 1,
        64 · pair], or where groups are in no order a row for each step."""
        pair, widened = self.shape[3], of_groups.to(wide)
        if self.even:
            # Torch multiplies rows of 128 ten times as fast as pairs by one number.
            return widened.repeat_interleave(pair, dim=2)[:, :, None]
        of_inputs = widened[:, self.groups].view(len(widened), -1, pair, self.shape[2])
        return of_inputs.transpose(2, 3).flatten(2)[:, :, None]


def code_panels(matrix: QuantisedMatrix, even: int) -> CodedPanels:
    """A copy of the matrix in panels; `even` is `group_length` of its groups."""
    rows, columns = matrix.shape
    shape = shape_of_panels(rows, columns, matrix.dtype)
    panels, steps, width, pair = shape
    inputs = steps * pair
    # The last panel and the last step may be filled with any number: x is zero there, and
    # nothing reads the outputs.
    filled = torch.arange(panels * width, device=matrix.groups.device).clamp(max=rows - 1)

    def in_panels(codes: Tensor) -> Tensor:
        whole = F.pad(codes, (0, inputs - columns)).view(panels, width, steps, pair)
        return whole.transpose(1, 2).reshape(panels * steps, width * pair)

    even = even if even and inputs % even == 0 and even % pair == 0 else 0

    def by_panel(of_rows: Tensor) -> Tensor:
        by_output = take_rows(of_rows, filled).view(panels, width, -1).transpose(1, 2)
        beyond = inputs // even - by_output.shape[1] if even else 0
        if beyond > 0:  # groups of the last step that the matrix has not; any factor will do
            by_output = torch.cat((by_output, by_output[:, -1:].expand(-1, beyond, -1)), dim=1)
        return copied(by_output, matrix.device)

    last = matrix.groups[-1:].expand(inputs - columns)
    return CodedPanels(
        codes=matrix.codes.with_rows(filled).arranged(in_panels).copied(matrix.device),
        scales=by_panel(matrix.scales),
        zeros=None if matrix.zeros is None else by_panel(matrix.zeros),
        groups=torch.cat([matrix.groups, last]).to(matrix.device),
        even=even,
        shape=shape,
        dtype=matrix.dtype,
    )


# Numbers that stay in the cache of a core until they are multiplied.
_TILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CodedPanelLinear:
    """A product that dequantises as many panels at a time as stay in the cache; `bias` [out_dim],
    or [0] if there is none.

    A token's bits depend on the token and the weight alone.
    """

    panels: CodedPanels
    out_dim: int
    in_dim: int
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        count, *rest = self.panels.shape
        y, width = x.new_empty(len(x), self.out_dim), self.panels.shape[2]
        tile = max(1, _TILE_BYTES // (x.itemsize * rest[0] * rest[1] * rest[2]))
        for first in range(0, count, tile):
            numbers = self.panels.dequantised(first, min(first + tile, count))
            outputs = slice(first * width, min((first + tile) * width, self.out_dim))
            weights = panels_in(numbers, outputs.stop - outputs.start, self.in_dim)
            y[:, outputs] = packed_product(x, weights, self.bias[outputs])
        return y
