"""The loops over weights in blocks for the CPU: codes become panels on their way to the products.

Formulas and names are those of `block_product`. Up to 16 tokens follow a run of a panel through the
nearest cache; for more a thread decodes a whole panel, and multiplies it as `packed_product` does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferryman_kernels.cpu._compiled import (
    STRICT,
    WEIGHTS_PER_ELEMENT,
    Loop,
    narrow,
    numba,
    part,
    prange,
    row_like,
)
from ferryman_kernels.cpu._lanes import HAS_DOTS, LANES, STEP_BYTES, lanes_at, no_sums
from ferryman_kernels.cpu._panel_tiles import WORD_BYTES, add_span
from ferryman_kernels.cpu._tiles import (
    ROWS,
    add_few_tokens,
    aligned_words,
    clear_sums,
    configure_rows,
    has_tiles,
    store_few_sums,
)
from ferryman_kernels.cpu._vectors import multiplied as product_of
from ferryman_kernels.cpu._vectors import row_at
from ferryman_kernels.products._packed_product_compiled import likes
from ferryman_kernels.products._panel_sums import (
    close,
    multiply_panel,
    opened_for,
    slice_length,
    write_panel,
)
from ferryman_kernels.products.blocks._block_codes import (
    CHUNK_INPUTS,
    FACTORS_BYTES,
    bytes_at,
    decode_eight,
    decode_five,
    decode_four,
    decode_six,
    e4m3_at,
    floats_at,
    halves_at,
    less_scaled,
    signed_at,
    store_factors,
    upper_halves_at,
)

if numba is not None:
    from numba.extending import overload

FEW = 16
"""The most tokens that follow a panel run by run."""
_RUN_BLOCKS = 2
_BLOCK_STEPS = ROWS
_BLOCK_INPUT_BYTES = 2 * ROWS * 2
_HALVES_BYTES = 2 * LANES
NO_CODES, UNSIGNED, SIGNED = 0, 1, 2
"""Scales of a group beside those of a record: none, or bytes without and with a sign."""
HALVES, POWERS, E4M3, FLOATS = 0, 1, 2, 3
"""The scales of a record: float16, the upper halves of float32, FP8 (E4M3), float32."""


@part
def _scale_at(stored: Any, address: Any) -> Any:
    if stored == POWERS:
        return upper_halves_at(address)
    if stored == E4M3:
        return e4m3_at(address)
    if stored == FLOATS:
        return floats_at(address)
    return halves_at(address)


@part
def _scales_bytes(stored: Any) -> Any:
    """The bytes of a record's scales."""
    if stored == E4M3:
        return LANES
    return 4 * LANES if stored == FLOATS else _HALVES_BYTES


@part
def _byte_at(kind: Any, address: Any) -> Any:
    if kind == SIGNED:
        return signed_at(address)
    return bytes_at(address)


@part
def _write_factors(
    stored: Any, form: Any, record: Any, group: Any, factors: Any, room: Any
) -> None:
    """The scales and shifts of a group, whose bytes begin at the address `group`, to `room`."""
    _, _, _, has_shift, kind, scales, offset = form
    scale = _scale_at(scales, record)
    if kind != NO_CODES:
        scale = product_of(scale, _byte_at(kind, group))
    scale = product_of(scale, factors)
    shift = no_sums()
    if has_shift:
        shift = halves_at(record + _scales_bytes(scales))
        if kind != NO_CODES:
            shift = product_of(shift, bytes_at(group + LANES))
        shift = product_of(shift, factors)
    store_factors(stored, room, scale)
    store_factors(stored, room + FACTORS_BYTES, less_scaled(shift, scale, np.float32(offset)))


@part
def _decode(
    stored: Any, form: Any, table: Any, panel: Any, factors: Any, first: Any, end: Any, room: Any,
    near: Any,
) -> None:  # fmt: skip
    """Writes the inputs of groups `first` to `end` of the panel at an address to `near`."""
    bits, group_len, groups, has_shift, kind, scales, _ = form
    head, coded = _scales_bytes(scales) + _HALVES_BYTES * has_shift, 0
    if kind != NO_CODES:
        coded = LANES * (1 + has_shift)
    group_bytes = coded + LANES * group_len * bits // 8
    chunks, record_bytes = group_len // CHUNK_INPUTS, head + groups * group_bytes
    written = chunks * STEP_BYTES * _steps_of_chunk(stored)
    for group in range(first, end):
        record = panel + group // groups * record_bytes
        at = record + head + group % groups * group_bytes
        _write_factors(stored, form, record, at, factors, room)
        codes, to = at + coded, near + (group - first) * written
        if bits == 4:
            decode_four(stored, codes, chunks, table, room, to)
        elif bits == 5:
            decode_five(stored, codes, chunks, table, room, to)
        elif bits == 6:
            decode_six(stored, codes, chunks, table, room, to)
        else:
            decode_eight(stored, codes, chunks, table, room, to)


def _steps_of_chunk(stored: Any) -> int:
    """The steps of a panel that a chunk becomes."""
    raise NotImplementedError("only in compiled loops")


def _few_sums(
    stored: Any, multiplied: Any, weight: Any, panel: Any, factors: Any, steps: Any, x: Any,
    stride: Any, rows: Any, config: Any, sums: Any, near: Any,
) -> None:  # fmt: skip
    """The products of a panel with up to FEW tokens; `weight` is its form, the address of its table
    and that of a room for factors."""
    raise NotImplementedError("only in compiled loops")


@part
def _few_by_tiles(
    stored: Any, weight: Any, panel: Any, factors: Any, steps: Any, x: Any, stride: Any, rows: Any,
    config: Any, sums: Any, near: Any,
) -> None:  # fmt: skip
    form, table, room = weight
    of_block = 2 * ROWS // form[1]
    configure_rows(config, rows, rows)
    clear_sums()
    blocks = steps // _BLOCK_STEPS
    for first in range(0, blocks, _RUN_BLOCKS):
        end = min(first + _RUN_BLOCKS, blocks)
        _decode(stored, form, table, panel, factors, first * of_block, end * of_block, room, near)
        for block in range(first, end):
            start = near + (block - first) * _BLOCK_STEPS * STEP_BYTES
            add_few_tokens(start, STEP_BYTES, x + block * _BLOCK_INPUT_BYTES, stride)
    store_few_sums(sums, STEP_BYTES)


@part
def _few_by_vectors(
    stored: Any, multiplied: Any, weight: Any, panel: Any, factors: Any, steps: Any, x: Any,
    stride: Any, rows: Any, sums: Any, near: Any,
) -> None:  # fmt: skip
    form, table, room = weight
    inputs = x + stride * np.arange(rows)
    starts, totals = inputs.ctypes.data, sums.ctypes.data
    sums[: rows * LANES] = 0
    of_group = form[1] // CHUNK_INPUTS * _steps_of_chunk(stored)
    run = _RUN_BLOCKS * _BLOCK_STEPS // of_group * of_group
    run = max(run, of_group)
    for first in range(0, steps, run):
        end = min(first + run, steps)
        _decode(stored, form, table, panel, factors, first // of_group, end // of_group, room, near)
        # Steps are counted from the panel's first one, which would lie so far before the memory.
        origin = near - first * STEP_BYTES
        add_span(stored, multiplied, origin, (first, end), rows, starts, totals, near, 0)
    inputs[0] = 0  # numba ends an array's life after its last use


@part
def decoded_steps(steps: Any, tokens: Any) -> Any:
    """The steps of a panel that are decoded at once for so many tokens."""
    return steps if tokens > FEW else 2 * _RUN_BLOCKS * _BLOCK_STEPS


@part
def multiply_codes(
    stored: Any, multiplied: Any, weight: Any, panel: Any, factors: Any, steps: Any, x: Any,
    stride: Any, rows: Any, added: Any, output: Any, y: Any, out_dim: Any, length: Any,
    opened: Any, near: Any,
) -> None:  # fmt: skip
    """Multiplies as `multiply_panel` does, by the panel of codes at an address, whose outputs begin
    at `output`; `weight` and `factors` as in `_few_sums`. `near` is the address of room for
    `decoded_steps`."""
    form, table, room = weight
    tokens = len(rows)
    if tokens <= FEW:
        _few_sums(
            stored, multiplied, weight, panel, factors, steps, x, stride, tokens, opened[2],
            opened[0], near,
        )  # fmt: skip
        write_panel(opened, rows, added, output, y, out_dim)
    else:
        groups = steps // (form[1] // CHUNK_INPUTS * _steps_of_chunk(stored))
        _decode(stored, form, table, panel, factors, 0, groups, room, near)
        for first in range(0, tokens, length):
            multiply_panel(
                stored, multiplied, opened, near, steps, x + first * stride, stride,
                rows[first : first + length], added, output, y, out_dim,
            )  # fmt: skip


def _product(
    stored: Any, multiplied: Any, like: Any, form: Any, table: int, panels: int, panel_bytes: int,
    factors: int, factor: Any, bias: int, bias_dim: int, x: int, stride: int, steps: int,
    tokens: int, y: int, out_dim: int, threads: int,
) -> None:  # fmt: skip
    """Tensors are addresses; the first three as in `likes`, `factor` an empty row of float32."""
    added, numbers, out = row_at(bias, like)[:bias_dim], np.arange(tokens), row_at(y, like)
    of_rows, length = row_at(factors, factor), slice_length(steps * WORD_BYTES)
    jobs = (out_dim + LANES - 1) // LANES
    workers = min(jobs, threads)
    for worker in prange(workers):
        opened = opened_for(multiplied, min(tokens, length))
        room = aligned_words(2 * FACTORS_BYTES // WORD_BYTES)
        near = aligned_words(decoded_steps(steps, tokens) * STEP_BYTES // WORD_BYTES)
        to, weight = near.ctypes.data, (form, table, room.ctypes.data)
        for panel in range(jobs * worker // workers, jobs * (worker + 1) // workers):
            at, output = panels + panel * panel_bytes, panel * LANES
            of_panel = lanes_at(of_rows, output)
            multiply_codes(
                stored, multiplied, weight, at, of_panel, steps, x, stride, numbers, added, output,
                out, out_dim, length, opened, to,
            )  # fmt: skip
        close(multiplied, opened)
        near[0], room[0] = 0, 0  # numba ends an array's life after its last use


def _decoding(
    stored: Any, form: Any, table: int, panels: int, panel_bytes: int, factors: int, factor: Any,
    steps: int, first: int, count: int, decoded: int,
) -> None:  # fmt: skip
    """Writes `count` panels from `first` on to the address `decoded`."""
    of_rows = row_at(factors, factor)
    groups = steps // (form[1] // CHUNK_INPUTS * _steps_of_chunk(stored))
    for number in prange(count):
        panel, room = first + number, aligned_words(2 * FACTORS_BYTES // WORD_BYTES)
        at, to = panels + panel * panel_bytes, decoded + number * steps * STEP_BYTES
        of_panel = lanes_at(of_rows, panel * LANES)
        _decode(stored, form, table, at, of_panel, 0, groups, room.ctypes.data, to)
        room[0] = 0  # as above


@part
def _write_row(
    stored: Any, weight: Any, panel: Any, factors: Any, steps: Any, lane: Any, number: Any,
    row: Any, y: Any,
) -> None:  # fmt: skip
    """Writes the numbers of an output of the panel at an address to row `row` of y; `weight` as in
    `_few_sums`, `number` an empty row of the panel's dtype."""
    form, table, room = weight
    groups = steps // (form[1] // CHUNK_INPUTS * _steps_of_chunk(stored))
    near = aligned_words(steps * STEP_BYTES // WORD_BYTES)
    _decode(stored, form, table, panel, factors, 0, groups, room, near.ctypes.data)
    decoded, of_step = row_at(near.ctypes.data, number), STEP_BYTES // LANES // number.itemsize
    for index in range(y.shape[1]):
        y[row, index] = decoded[(index // of_step * LANES + lane) * of_step + index % of_step]
    near[0] = 0  # numba ends an array's life after its last use


def _rows(
    stored: Any, like: Any, form: Any, table: int, panels: int, panel_bytes: int, factors: int,
    factor: Any, out_dim: int, steps: int, rows: int, indices: Any, count: int, y: int,
    in_dim: int,
) -> None:  # fmt: skip
    """Writes the numbers of `count` outputs, whose indices are at the address `rows`, to y [count,
    in_dim]; `indices` is an empty row of their dtype."""
    of_rows, outputs = row_at(factors, factor), row_at(rows, indices)[:count]
    out = row_at(y, like)[: count * in_dim].reshape(count, in_dim)
    for row in prange(count):
        output, room = outputs[row], aligned_words(2 * FACTORS_BYTES // WORD_BYTES)
        if 0 <= output < out_dim:
            at, lane = panels + output // LANES * panel_bytes, output % LANES
            of_panel = lanes_at(of_rows, output // LANES * LANES)
            weight = (form, table, room.ctypes.data)
            _write_row(stored, weight, at, of_panel, steps, lane, like, row, out)
        else:
            for index in range(in_dim):
                out[row, index] = narrow(np.float32(np.nan), out)
        room[0] = 0  # as above


def _steps_by_type(stored: Any) -> Callable[..., int]:
    if stored == numba.types.uint16:
        return lambda stored: 1
    return lambda stored: CHUNK_INPUTS


def _few_by_type(stored: Any, multiplied: Any, *_: Any) -> Callable[..., None]:
    def by_tiles(
        stored: Any, multiplied: Any, weight: Any, panel: Any, factors: Any, steps: Any, x: Any,
        stride: Any, rows: Any, config: Any, sums: Any, near: Any,
    ) -> None:  # fmt: skip
        _few_by_tiles(
            stored, weight, panel, factors, steps, x, stride, rows, config, sums.ctypes.data, near
        )

    def by_vectors(
        stored: Any, multiplied: Any, weight: Any, panel: Any, factors: Any, steps: Any, x: Any,
        stride: Any, rows: Any, config: Any, sums: Any, near: Any,
    ) -> None:  # fmt: skip
        _few_by_vectors(
            stored, multiplied, weight, panel, factors, steps, x, stride, rows, sums, near
        )

    return by_tiles if isinstance(multiplied, numba.types.NoneType) else by_vectors


if numba is not None:
    for stub, chosen in ((_steps_of_chunk, _steps_by_type), (_few_sums, _few_by_type)):
        overload(stub, jit_options={"error_model": "numpy"}, strict=False)(chosen)

_product_loop, _decoding_loop = Loop(_product, STRICT), Loop(_decoding, STRICT)
_rows_loop = Loop(_rows, STRICT)
FACTOR = np.empty(0, np.float32)
TOKENS_AS_LONG_AS_DECODING = 32


def kinds_of(dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """`likes`, but None for a product by tiles."""
    return _kinds(dtype, HAS_DOTS, has_tiles())


@cache
def _kinds(dtype: torch.dtype, has_dots: bool, is_tiled: bool) -> tuple[Any, Any, Any]:
    stored, multiplied, like = likes(dtype, has_dots)
    return stored, None if is_tiled and dtype is torch.bfloat16 else multiplied, like


def block_product_compiled(
    x: Tensor, form: tuple[int, ...], table: Tensor, panels: Tensor, factors: Tensor, bias: Tensor,
    out_dim: int,
) -> Tensor:  # fmt: skip
    """x [tokens, in_dim]; all else as in `BlockPanels`."""
    x = x if x.stride(1) == 1 else x.contiguous()
    (tokens, in_dim), size = x.shape, x.itemsize
    y = torch.empty(tokens, out_dim, dtype=x.dtype)
    if not tokens:  # tiles of no rows are not configured, and end the process
        return y
    elements = out_dim * in_dim
    _product_loop(
        elements + elements * tokens // TOKENS_AS_LONG_AS_DECODING,
        *kinds_of(x.dtype), form, table.data_ptr(), panels.data_ptr(),
        panels.stride(0), factors.data_ptr(), FACTOR, bias.data_ptr(), bias.numel(), x.data_ptr(),
        x.stride(0) * size, in_dim * size // WORD_BYTES, tokens, y.data_ptr(), out_dim,
        torch.get_num_threads(),
    )  # fmt: skip
    return y


def decode_panels_compiled(
    form: tuple[int, ...], table: Tensor, panels: Tensor, factors: Tensor, first: int,
    decoded: Tensor,
) -> None:  # fmt: skip
    """Fills `decoded` [panels, steps, 64, inputs of a step] from panel `first` on."""
    count, steps, _, _ = decoded.shape
    stored, _, _ = likes(decoded.dtype, HAS_DOTS)
    _decoding_loop(
        decoded.numel() // WEIGHTS_PER_ELEMENT,
        stored, form, table.data_ptr(), panels.data_ptr(), panels.stride(0), factors.data_ptr(),
        FACTOR, steps, first, count, decoded.data_ptr(),
    )  # fmt: skip


def block_rows_compiled(
    form: tuple[int, ...], table: Tensor, panels: Tensor, factors: Tensor, out_dim: int, steps: int,
    rows: Tensor, numbers: Tensor,
) -> None:  # fmt: skip
    """Fills `numbers` [n, in_dim] with the outputs `rows` [n]; panels have so many steps."""
    stored, _, like = likes(numbers.dtype, HAS_DOTS)
    rows = rows.contiguous()
    count, in_dim = numbers.shape
    _rows_loop(
        count * LANES * in_dim // WEIGHTS_PER_ELEMENT,
        stored, like, form, table.data_ptr(), panels.data_ptr(), panels.stride(0),
        factors.data_ptr(), FACTOR, out_dim, steps, rows.data_ptr(), row_like(rows.dtype), count,
        numbers.data_ptr(), in_dim,
    )  # fmt: skip
