"""The vectors of compiled loops in numpy, with their bits: parts that loops of Python call.

A vector is an array of float32, or 64 lanes of one. bfloat16 is the upper half of a float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

LANES = 16
LOG2_E = np.float32(1.44269504)
LOG_2 = np.float32(-0.693359375), np.float32(2.12194440e-4)
"""-log 2, as a short number and the rest of it."""
EXP_SERIES = np.array(
    [1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5],
    np.float32,
)


def widened(halves: NDArray[np.uint16]) -> Floats:
    """The numbers that bfloat16 stand for."""
    return (halves.astype(np.uint32) << 16).view(np.float32)


def rounded(numbers: Floats) -> NDArray[np.uint16]:
    """The bfloat16 nearest to each number, to the even one of two."""
    words = np.asarray(numbers, np.float32).view(np.uint32)
    return ((words + 0x7FFF + (words >> 16 & 1)) >> 16).astype(np.uint16)


@np.errstate(all="ignore")
def fused(a: Any, b: Any, c: Any) -> Floats:
    """a · b + c, rounded once. In float64 the product is exact; where the sum is not, its last bit
    is made odd, so that rounding it again rounds to the same side as rounding once."""
    product = np.float64(a) * np.float64(b)
    total = np.asarray(product + c)
    of_c = total - product
    lost = (product - (total - of_c)) + (c - of_c)
    is_even = np.isfinite(total) & (lost != 0) & (total.view(np.int64) & 1 == 0)
    odd = np.nextafter(total, np.copysign(np.inf, lost))
    return np.where(is_even, odd, total).astype(np.float32)


@np.errstate(all="ignore")
def exps(x: Floats) -> Floats:
    """exp(k·log 2 + r) = 2ᵏ·exp(r), as `_vectors` has it: 0 below -64, infinite above 88.37."""
    least, most, half, one = (np.float32(number) for number in (-64, 89, 0.5, 1))
    within = np.where(x >= least, x, least)
    within = np.where(within < most, within, most)
    k = np.floor(fused(within, LOG2_E, half))
    r = within
    for part in LOG_2:
        r = fused(k, part, r)
    p = np.full_like(r, EXP_SERIES[0])
    for factor in EXP_SERIES[1:]:
        p = fused(p, r, factor)
    p = fused(p, r * r, r) + one
    power = ((k.astype(np.int32) + 127) << 23).view(np.float32)
    return np.where(x >= least, p * power, np.where(x < least, np.float32(0), x))


def load(array: NDArray[Any], at: int) -> Floats:
    lanes = array[at : at + LANES]
    return widened(lanes) if array.dtype == np.uint16 else lanes.copy()


def store(array: NDArray[Any], at: int, vector: NDArray[Any]) -> None:
    array[at : at + len(vector)] = vector


def store_narrow(array: NDArray[Any], at: int, vector: Floats) -> None:
    store(array, at, rounded(vector) if array.dtype == np.uint16 else vector)


def greater(a: Floats, b: Floats) -> Floats:
    return np.where(a > b, a, b)


def folded(vector: Floats, join: Callable[[Floats, Floats], Floats]) -> np.float32:
    """The upper half of the lanes joined to the lower half, until one is left."""
    while len(vector) > 1:
        half = len(vector) // 2
        vector = join(vector[:half], vector[half:])
    number: np.float32 = vector[0]
    return number


def wide(value: Any) -> np.float32:
    number: np.float32 = widened(value[None])[0] if value.dtype == np.uint16 else value
    return number


def narrow(value: Any, like: NDArray[Any]) -> Any:
    if like.dtype != np.uint16:
        return value
    return rounded(value[None])[0] if value == value else np.uint16(0x7FC0)


def bytes_at(address: int, count: int) -> NDArray[np.uint8]:
    """The memory at an address; its owner keeps it alive."""
    memory = (ctypes.c_uint8 * count).from_address(int(address))
    return np.ndarray((count,), np.uint8, memoryview(memory))


def turn_words(
    rows: NDArray[np.uint16], places: NDArray[np.int64], first: Any, words: Any, to: int
) -> None:
    """As `_tile_split_compiled` has it: words of 16 rows become columns, 32 words a line."""
    low, channel = first
    for row in range(LANES):
        at = places[low + row] + channel
        of_row = rows[at : at + 2 * LANES].copy().view(np.int32)
        words[to + row : to + row + 2 * LANES * LANES : 2 * LANES] = of_row


def pair_rows(rows: NDArray[np.uint16], places: Any, masks: Any, words: Any, to: int) -> None:
    """The same: 16 pairs of two rows' numbers, the first one in the lower half."""
    lower, upper = (
        rows[at : at + LANES].astype(np.int32) & mask
        for at, mask in zip(places, masks, strict=True)
    )
    words[to : to + LANES] = lower | upper << 16


def widen_codes(codes: int, pairs: int) -> None:
    """As `_code_pairs` has it: a step of two inputs' codes as 32 pairs of bfloat16."""
    step = bytes_at(codes, 4 * LANES).view(np.int8).reshape(2, 2 * LANES).T
    bytes_at(pairs, 8 * LANES)[:] = rounded(step.astype(np.float32)).reshape(-1).view(np.uint8)


def add_two_inputs(sums: Floats, codes: int, x: Floats, at: int) -> Floats:
    """The same: two inputs' products with the codes of a step, each added to half of the lanes."""
    step = bytes_at(codes, 4 * LANES).view(np.int8).astype(np.float32)
    return fused(step, np.repeat(x[at : at + 2], 2 * LANES), sums)


def add_block(total: Floats, sums: Floats) -> Floats:
    """The same: both inputs' sums are added, and then added to `total`, lane by lane."""
    return total + np.tile(sums[: 2 * LANES] + sums[2 * LANES :], 2)


def nothing(*_: object) -> None:
    """In place of a wish for memory."""


VECTOR_PARTS: dict[str, Callable[..., Any]] = {
    "load": load,
    "store": store,
    "store_narrow": store_narrow,
    "prefetch": nothing,
    "spread": lambda number: np.full(LANES, number, np.float32),
    "fused": fused,
    "multiplied": lambda a, b: a * b,
    "plus": lambda a, b: a + b,
    "quotient": lambda a, b: a / b,
    "greater": greater,
    "greatest": lambda vector: folded(vector, greater),
    "total": lambda vector: folded(vector, np.add),
    "exps": exps,
    "exp": lambda number: exps(np.array([number], np.float32))[0],
    "wide": wide,
    "narrow": narrow,
    "ask_for_lines": nothing,
    "ask_for_row": nothing,
    "_turn_words": turn_words,
    "_pair_rows": pair_rows,
    "widen_codes": widen_codes,
    "add_two_inputs": add_two_inputs,
    "add_block": add_block,
    "no_sums": lambda: np.zeros(4 * LANES, np.float32),
}
