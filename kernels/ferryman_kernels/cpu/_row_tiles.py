"""Parts of loops over a tile of 4 rows × 64 lanes, whose sums stay in registers.

A vector is loaded once for four rows, and each product is fused with its sum in the order of the
source, so the bits do not depend on what else is computed.
"""

from __future__ import annotations

from typing import Any

from ferryman_kernels.cpu._compiled import part
from ferryman_kernels.cpu._lanes import add_scaled, lanes_at
from ferryman_kernels.cpu._vectors import store

ROWS = 4
"""Rows that share a vector while it is in a register."""
PRODUCTS_PER_ELEMENT = 16
"""A product takes a sixteenth of the time of an element of other loops."""


@part
def padded(count: Any, unit: Any) -> Any:
    return (count + unit - 1) // unit * unit


@part
def rows_at(rows: Any, at: Any, step: Any) -> Any:
    """Four rows of 64 lanes, `step` apart, as sums to go on with."""
    return (
        lanes_at(rows, at),
        lanes_at(rows, at + step),
        lanes_at(rows, at + 2 * step),
        lanes_at(rows, at + 3 * step),
    )


@part
def add_rows(sums: Any, vectors: Any, places: Any, factors: Any, at: Any, count: Any) -> Any:
    """Four sums of 64 lanes, with `count` vectors added, each times a factor of the row.

    `places` are the first vector's place, the step to the next one; a row's step to the next
    factor, and the step to the next row.
    """
    sums0, sums1, sums2, sums3 = sums
    place, next_vector, next_factor, next_row = places
    for _ in range(count):
        sums0 = add_scaled(sums0, vectors, place, factors[at])
        sums1 = add_scaled(sums1, vectors, place, factors[at + next_row])
        sums2 = add_scaled(sums2, vectors, place, factors[at + 2 * next_row])
        sums3 = add_scaled(sums3, vectors, place, factors[at + 3 * next_row])
        place += next_vector
        at += next_factor
    return sums0, sums1, sums2, sums3


@part
def store_rows(rows: Any, at: Any, step: Any, sums: Any) -> None:
    sums0, sums1, sums2, sums3 = sums
    store(rows, at, sums0)
    store(rows, at + step, sums1)
    store(rows, at + 2 * step, sums2)
    store(rows, at + 3 * step, sums3)
