"""The states of a head in its slots, as the loops of recurrences find and keep them."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from ferryman_kernels.cpu._compiled import part
from ferryman_kernels.cpu._vectors import row_at


@part
def stored_at(first_state: Any, slot: Any, slot_bytes: Any) -> Any:
    """The address of a head's state in a slot, from that in slot 0; 0 for a negative slot."""
    return first_state + slot * slot_bytes if slot >= 0 else np.intp(0)


@part
def copy_state(floats: Any, source: Any, width: Any, target: Any, step: Any, size: Any) -> None:
    """Copies a state of `size` between two addresses, where rows are `width` and `step` apart."""
    rows, columns = size
    old, new = row_at(source, floats), row_at(target, floats)
    for row in range(rows):
        for n in range(columns):
            new[row * step + n] = old[row * width + n]


@part
def open_state(floats: Any, stored: Any, size: Any, whole: Any, held: Any) -> Any:
    """The state lies at `stored`, or in the room `held` if its rows are not whole vectors, or if
    it is cleared (`stored` is 0)."""
    rows, width = whole
    if stored != 0 and size == whole:
        return stored
    room = row_at(held, floats)
    for n in range(rows * width):
        room[n] = 0
    if stored != 0:
        copy_state(floats, stored, size[1], held, width, size)
    return held


@part
def place_after(stored: Any, size: Any, whole: Any, held: Any) -> Any:
    """The address where a loop writes the state that belongs at `stored` (0: nowhere)."""
    return stored if stored != 0 and size == whole else held


@part
def keep_state(floats: Any, place: Any, stored: Any, size: Any, whole: Any) -> None:
    """Copies the state at `place`, in whole vectors, to `stored`, unless it lies there already."""
    if stored != 0 and stored != place:
        copy_state(floats, place, whole[1], stored, size[1], size)


def in_rows(tokens: Tensor) -> Tensor:
    """The tensor with each token's [heads, dim] in one piece, however far tokens are apart."""
    is_dense = tokens.stride()[1:] == (tokens.shape[2], 1)
    return tokens if is_dense else tokens.contiguous()
