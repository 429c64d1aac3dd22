"""Orders of rows and columns that llama.cpp's converter changes.

An order is the file's place of each row or column of the folder:

    heads     ggml's plain rope turns neighbours, so the halves of each head alternate in the file
    deltas    a delta net's rows by role in the file, by key head in a folder of Qwen3-Next
    tiles     value heads by their number within a key head in the file, by key head in the folder
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Order = NDArray[np.int64]


def turned_heads(heads: int, head_dim: int) -> Order:
    """In the folder a channel of a head turns with the one half a head further on, in the file with
    its neighbour. A converter pairs whole heads, also of a model of which only a part turns."""
    of_head = np.arange(head_dim).reshape(-1, 2).T.flatten()
    order: Order = (np.arange(heads)[:, None] * head_dim + of_head).flatten()
    return order


def by_key_head(k_heads: int, *sizes: int) -> Order:
    """The folder has the rows of all roles of each key head; the file has the roles in turn, of
    which each key head has `sizes` rows."""
    starts = np.cumsum([0, *(k_heads * size for size in sizes[:-1])])
    roles = [
        (start + np.arange(k_heads * size)).reshape(k_heads, size)
        for start, size in zip(starts, sizes, strict=True)
    ]
    order: Order = np.concatenate(roles, axis=1).flatten()
    return order


def untiled(k_heads: int, v_heads: int, size: int, before: int = 0) -> Order:
    """The folder has the value heads of each key head together, the file those of the same number.

    A value head has `size` rows; `before` rows stand ahead of them and keep their place.
    """
    tiles = np.arange(v_heads * size).reshape(v_heads // k_heads, k_heads, size)
    order = before + tiles.swapaxes(0, 1).flatten()
    return np.concatenate([np.arange(before), order])


def alternating(half: int) -> Order:
    """The folder has rows of gate and up in turn, the file all of gate first."""
    return np.arange(2 * half).reshape(2, half).T.flatten()


def whole_blocks(order: Order, block_len: int) -> Order | None:
    """The order of blocks of `block_len`, or None if it cuts one."""
    if len(order) % block_len:
        return None
    blocks = order.reshape(-1, block_len)
    in_place = blocks[:, :1] + np.arange(block_len)
    is_whole = (blocks[:, 0] % block_len == 0).all() and (blocks == in_place).all()
    return blocks[:, 0] // block_len if is_whole else None
