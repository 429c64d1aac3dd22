"""A chunk chooses the places that its tokens choose alone, in decode, however it is cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.loop_versions import answers_of_one_thread_and_two
from tests.kernels.slabs import PAGE_SIZE, row_pages, table_of
from torch import Tensor

from ferryman_kernels.attention._sparse_index_compiled import _score_loop, index_scores_compiled
from ferryman_kernels.attention.sparse_index import choose_decode, choose_prefill

pytest.importorskip("numba")

DIM = 20


class IndexedPrompt:
    """Queries and index keys of one request. Keys are few different ones, each several times and
    some by a rounding apart: their scores are near ties."""

    def __init__(self, length: int, heads: int, dtype: torch.dtype) -> None:
        self.length = length
        generator = torch.Generator().manual_seed(length * 100 + heads)
        self.q = torch.randn(length, heads, DIM, generator=generator).to(dtype)
        self.weights = torch.randn(length, heads, generator=generator)
        few = torch.randn(5, DIM, generator=generator)
        kinds = torch.randint(0, 5, (length,), generator=generator)
        shaken = few[kinds] * (1 + 1e-6 * torch.randn(length, DIM, generator=generator))
        self.table, self.pages = table_of([length], 40), row_pages(dtype, 40, DIM)
        for position, key in enumerate(shaken.to(dtype)):
            self.pages[self.table[0, position // PAGE_SIZE], position % PAGE_SIZE] = key

    def chosen_by_a_chunk(self, start: int, end: int, count: int) -> Tensor:
        part = slice(start, end)
        given = self.q[part], self.weights[part], self.pages, self.table
        return choose_prefill(*given, ((start, end),), count)

    def chosen_by_single_tokens(self, start: int, end: int, count: int) -> Tensor:
        part, tables = slice(start, end), self.table.expand(end - start, -1).contiguous()
        given = self.q[part], self.weights[part], self.pages, tables
        return choose_decode(*given, torch.arange(start, end), count)


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    length=st.integers(2, 120),
    heads=st.sampled_from([1, 3, 16, 33, 64]),
    count=st.integers(1, 40),
    threads=st.integers(1, 3),
)
def test_a_chunk_chooses_what_its_tokens_choose_alone(
    data: st.DataObject, dtype: torch.dtype, length: int, heads: int, count: int, threads: int
) -> None:
    prompt = IndexedPrompt(length, heads, dtype)
    start = data.draw(st.integers(0, length - 1))
    end = data.draw(st.integers(start + 1, length))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        chunk = prompt.chosen_by_a_chunk(start, end, count)
    finally:
        torch.set_num_threads(before)
    together = prompt.chosen_by_single_tokens(start, end, count)
    for token in range(end - start):
        alone = prompt.chosen_by_single_tokens(start + token, start + token + 1, count)
        assert _named(chunk[token]) == _named(together[token]) == _named(alone[0])


def _named(places: Tensor) -> list[int]:
    return [place for place in places.tolist() if place >= 0]


def test_threads_leave_the_bits_of_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = IndexedPrompt(50, 33, torch.float32)
    rows, positions = torch.zeros(50, dtype=torch.int64), torch.arange(50)
    given = prompt.q, prompt.weights, prompt.pages, prompt.table, rows, positions
    alone, shared = answers_of_one_thread_and_two(
        monkeypatch, _score_loop, lambda: index_scores_compiled(*given)
    )
    assert torch.equal(alone, shared)
