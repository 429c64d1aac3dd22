"""Attention over windows whose pages are freed, with and without sinks and caps, against softmax
written out.

All memory that no query sees is NaN here. Pages behind the window are -1 in the table, and the
other pages hold the written tokens only. One stray read shows in every later logit.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from tests.kernels.oracles import attended, first_seen, wide
from torch import Tensor

from ferryman_kernels.attention import paged_attention
from ferryman_kernels.attention._paged_attention_triton import (
    paged_attention_decode_triton,
    paged_attention_prefill_triton,
)
from ferryman_kernels.attention.paged_attention import (
    paged_attention_decode,
    paged_attention_prefill,
    paged_attention_reference,
)

Span = tuple[int, int]

SCALE, HEAD_DIM = 0.3, 8
CAPS = (0.0, 0.0, 0.4, 5.0, 50.0)
"""Caps of scores, which are about 1; 0 is none."""

CASES_PER_WINDOW = int(os.environ.get("FERRYMAN_TEST_WINDOW_CASES", "1"))
"""Random cases for each of the 70 windows; docs/kernels.md quotes a longer run."""


class Sequences:
    """Random keys and values of some requests, in scattered pages; the rest of the pages is NaN."""

    def __init__(
        self, rng: random.Random, ends: Sequence[int], page_size: int, dtype: torch.dtype
    ) -> None:
        self.rng, self.page_size, self.kv_heads = rng, page_size, rng.choice([1, 2, 3])
        shape = (self.kv_heads, HEAD_DIM)
        self.keys = [torch.randn(end, *shape).to(dtype) for end in ends]
        self.values = [torch.randn(end, *shape).to(dtype) for end in ends]
        used = [-(-end // page_size) for end in ends]
        slots = rng.sample(range(sum(used) + 3), sum(used))
        width = max(used) + rng.randint(0, 2)
        rows = [[slots.pop() for _ in range(n)] + [-1] * (width - n) for n in used]
        self.table = torch.tensor(rows)
        pages = torch.full((2, sum(used) + 3, self.kv_heads, page_size, HEAD_DIM), torch.nan)
        self.key_pages, self.value_pages = pages.to(dtype).unbind()

    def write(self, row: int, start: int, end: int) -> None:
        """Writes positions [start, end) of request `row` to its pages."""
        for p in range(start, end):
            slot = self.table[row, p // self.page_size]
            assert slot >= 0
            self.key_pages[slot, :, p % self.page_size] = self.keys[row][p]
            self.value_pages[slot, :, p % self.page_size] = self.values[row][p]

    def forget_before(self, row: int, position: int) -> None:
        """Frees every page that ends at or before `position`, as if another request had it now."""
        for index in range(position // self.page_size):
            slot = self.table[row, index]
            if slot >= 0:
                self.key_pages[slot] = self.value_pages[slot] = torch.nan
            self.table[row, index] = -1

    def answer(
        self, row: int, q: Tensor, position: int, window: int, sinks: Tensor, cap: float
    ) -> Tensor:
        """The answer to one query [q_heads, head_dim], in float64."""
        seen = slice(first_seen(position, window), position + 1)
        return attended(q, self.keys[row][seen], self.values[row][seen], SCALE, sinks, cap)


def _sinks(rng: random.Random, q_heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The sinks for the formula, and those for the kernel: some models have none."""
    if rng.random() < 0.3:
        return torch.full((q_heads,), -torch.inf), None
    sinks = torch.randn(q_heads, dtype=dtype) * rng.choice([0.5, 3.0])
    return sinks, sinks


def prefill_case(
    run: Callable[..., Tensor], rng: random.Random, window: int, dtype: torch.dtype, most: int
) -> tuple[Tensor, Tensor]:
    """Ragged chunks of up to `most` positions; pages before the first query's window are freed."""
    starts = [rng.choice([0, rng.randint(0, most)]) for _ in range(rng.randint(1, 3))]
    spans = [(start, start + rng.randint(1, most)) for start in starts]
    held = Sequences(rng, [end for _, end in spans], rng.choice([4, 8, 16, 32, 64]), dtype)
    q_heads = held.kv_heads * rng.choice([1, 2, 3])
    q = torch.randn(sum(end - start for start, end in spans), q_heads, HEAD_DIM).to(dtype)
    sinks, given = _sinks(rng, q_heads, wide(dtype))
    cap = rng.choice(CAPS)
    for row, (start, end) in enumerate(spans):
        held.write(row, 0, end)
        held.forget_before(row, first_seen(start, window))
    positions = [(row, p) for row, (start, end) in enumerate(spans) for p in range(start, end)]
    expected = [
        held.answer(row, q[t], p, window, sinks, cap) for t, (row, p) in enumerate(positions)
    ]
    y = run(q, held.key_pages, held.value_pages, held.table, spans, SCALE, window, given, cap)
    return y, torch.stack(expected)


def decode_case(
    run: Callable[..., Tensor], rng: random.Random, window: int, dtype: torch.dtype, most: int
) -> tuple[Tensor, Tensor]:
    """Runs of up to 4 consecutive tokens of a request, wave by wave, as in verifying drafts."""
    ends = [rng.randint(1, most) for _ in range(rng.randint(1, 4))]
    runs = [rng.randint(1, min(4, end)) for end in ends]
    held = Sequences(rng, ends, rng.choice([4, 8, 16, 32, 64]), dtype)
    waves = [(row, wave) for wave in range(4) for row, n in enumerate(runs) if wave < n]
    rows = [(row, ends[row] - runs[row] + wave) for row, wave in waves]
    q_heads = held.kv_heads * rng.choice([1, 2, 3])
    q = torch.randn(len(rows), q_heads, HEAD_DIM).to(dtype)
    sinks, given = _sinks(rng, q_heads, wide(dtype))
    cap = rng.choice(CAPS)
    for row, end in enumerate(ends):
        held.write(row, 0, end)
        held.forget_before(row, first_seen(end - runs[row], window))
    expected = [held.answer(row, q[t], p, window, sinks, cap) for t, (row, p) in enumerate(rows)]
    table = held.table[[row for row, _ in rows]]
    positions = torch.tensor([position for _, position in rows])
    y = run(q, held.key_pages, held.value_pages, table, positions, SCALE, window, given, cap)
    return y, torch.stack(expected)


@pytest.mark.parametrize("run", [paged_attention_prefill, paged_attention_reference])
@pytest.mark.parametrize("window", range(0, 71))
def test_a_chunk_sees_exactly_its_windows_and_never_a_page_behind_them(
    run: Callable[..., Tensor], window: int
) -> None:
    rng = random.Random(window)
    for _ in range(CASES_PER_WINDOW):
        y, expected = prefill_case(run, rng, window, torch.float64, 90)
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", range(0, 71))
def test_several_tokens_of_one_request_each_see_exactly_their_own_window(window: int) -> None:
    rng = random.Random(window)
    for _ in range(2 * CASES_PER_WINDOW):
        y, expected = decode_case(paged_attention_decode, rng, window, torch.float64, 150)
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 1, 5, 33, 70])
def test_narrow_dtypes_see_the_same_windows_and_sinks(window: int, dtype: torch.dtype) -> None:
    tolerance = 5e-6 if dtype is torch.float32 else 2e-2
    rng = random.Random(window)
    for case, run in (
        (prefill_case, paged_attention_prefill),
        (decode_case, paged_attention_decode),
    ):
        for _ in range(4):
            y, expected = case(run, rng, window, dtype, 90)
            assert y.dtype is dtype
            torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", [0, 1, 3, 17, 63, 70])
def test_triton_sees_the_same_windows_and_sinks(window: int, device: torch.device) -> None:
    rng = random.Random(window)

    def on_device(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args: run(*(a.to(device) if isinstance(a, Tensor) else a for a in args))

    for case, run in (
        (prefill_case, paged_attention_prefill_triton),
        (decode_case, paged_attention_decode_triton),
    ):
        y, expected = case(on_device(run), rng, window, torch.float32, 90)
        torch.testing.assert_close(y.cpu().double(), expected, rtol=1e-5, atol=1e-5)


def test_decode_without_compiled_loops_sees_the_same_windows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object) -> None:
        pytest.fail("the compiled loop ran")

    monkeypatch.setattr(paged_attention, "serves", lambda *_: False)
    monkeypatch.setattr(paged_attention, "paged_attention_decode_compiled", refused)
    for window in (0, 1, 9, 40):
        rng = random.Random(window)
        y, expected = decode_case(paged_attention_decode, rng, window, torch.float64, 150)
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
