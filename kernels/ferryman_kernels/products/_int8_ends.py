"""Two parts of both loops over int8 codes, for before their sums and after them.

Formulas and names are those of `int8_product`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ferryman_kernels.cpu._compiled import inlined, narrow, part, wide
from ferryman_kernels.cpu._vectors import LANES, load, multiplied, store_narrow

_LEAST = np.float32(2.0**-100)


@part
def may_underflow(numbers: Any) -> Any:
    """Whether a sum of products with codes may be smaller than 1.2e-38 and not zero. The
    processor's own products of pairs give zero then, and others do not."""
    is_tiny = False
    for i in range(len(numbers)):
        size = abs(wide(numbers[i]))
        is_tiny |= (size < _LEAST) & (size > 0)
    return is_tiny


@inlined
def write_scaled(sums: Any, scales: Any, y: Any, width: Any) -> None:
    """y[:width] ← sums · scales, each rounded once. Parts of rows would take as long as this."""
    whole = width // LANES * LANES
    for lane in range(0, whole, LANES):
        store_narrow(y, lane, multiplied(load(sums, lane), load(scales, lane)))
    for lane in range(whole, width):
        y[lane] = narrow(sums[lane] * wide(scales[lane]), y)
