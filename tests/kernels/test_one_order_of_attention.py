"""Prefill and decode on the CPU give a query the same bits, however its prompt is cut.

Rows are compared with the query alone, in decode: equality then holds for every cut, for a change
from prefill to decode, and beside any neighbour. The oracle of values is the formula in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.loop_versions import answers_of_one_thread_and_two
from torch import Tensor

from ferryman.model.shapes.state import CodedAttentionState
from ferryman_kernels.attention._block_attention_compiled import attend_loop
from ferryman_kernels.attention.latent_attention import (
    latent_attention_decode,
    latent_attention_prefill,
)
from ferryman_kernels.attention.paged_attention import (
    paged_attention_decode,
    paged_attention_prefill,
    paged_attention_reference,
)
from ferryman_kernels.attention.quantised_pages import CODE_DTYPE, coded
from ferryman_kernels.attention.splits import _tile_split_compiled
from ferryman_kernels.attention.splits._attention_split_compiled import SPLIT
from ferryman_kernels.cpu._tiles import has_tiles

pytest.importorskip("numba")

HAS_TILES = has_tiles()
FORMS = [(torch.float32, False), (torch.bfloat16, False)] + [(torch.bfloat16, True)] * HAS_TILES
"""Dtypes, with tiles and without, which stands for a processor that has none."""

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
HEAD_DIMS = (8, 24, 40, 64, 80, 96, 128, 512)


@contextmanager
def _form(uses_tiles: bool, threads: int = 1) -> Iterator[None]:
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_tile_split_compiled, "has_tiles", lambda: uses_tiles)
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


@pytest.fixture(params=FORMS, ids=str)
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """Each form's dtype, in that form."""
    kind, uses_tiles = request.param
    with _form(uses_tiles):
        yield kind


class HeadSizes(NamedTuple):
    kv: int
    group: int
    dim: int


class Prompt:
    """Keys, values and queries of one request, and pages of any size that hold them."""

    def __init__(self, length: int, heads: HeadSizes, dtype: torch.dtype, seed: int = 0) -> None:
        self.length, self.heads = length, heads
        draw = torch.Generator().manual_seed(seed)
        shape = (length, heads.kv, heads.dim)
        self.keys, self.values = (torch.randn(shape, generator=draw).to(dtype) for _ in "kv")
        self.q = torch.randn(length, heads.kv * heads.group, heads.dim, generator=draw).to(dtype)
        self.scale = heads.dim**-0.5

    def pages(self, page_size: int, written: int) -> tuple[Tensor, Tensor, Tensor]:
        """Pages with the first `written` positions, the rest NaN, in a random order; the table."""
        used = -(-self.length // page_size)
        table = torch.randperm(used)
        slab = torch.full((used, 2, self.heads.kv, page_size, self.heads.dim), torch.nan)
        slab = slab.to(self.q.dtype)
        for position in range(written):
            page, at = table[position // page_size], position % page_size
            slab[page, 0, :, at], slab[page, 1, :, at] = self.keys[position], self.values[position]
        keys, values = slab.unbind(1)
        return keys, values, table[None]

    def decoded(self, page_size: int, window: int, **seen: Any) -> Tensor:
        """Each query alone."""
        keys, values, table = self.pages(page_size, self.length)
        rows = [
            paged_attention_decode(
                self.q[p : p + 1],
                keys,
                values,
                table,
                torch.tensor([p]),
                self.scale,
                window,
                **seen,
            )
            for p in range(self.length)
        ]
        return torch.cat(rows)

    def prefilled(self, cuts: list[int], page_size: int, window: int, **seen: Any) -> Tensor:
        """In chunks that end at `cuts`, whose later positions are not written yet."""
        rows = []
        for start, end in zip([0, *cuts], [*cuts, self.length], strict=True):
            keys, values, table = self.pages(page_size, end)
            asked = self.q[start:end], keys, values, table, [(start, end)]
            rows.append(paged_attention_prefill(*asked, self.scale, window, **seen))
        return torch.cat(rows)

    def expected(self, window: int, **seen: Any) -> Tensor:
        keys, values, table = self.pages(16, self.length)
        q, keys, values = (t.double() for t in (self.q, keys, values))
        sinks = seen["sinks"]
        seen = seen | {"sinks": sinks if sinks is None else sinks.double()}
        spans = [(0, self.length)]
        return paged_attention_reference(q, keys, values, table, spans, self.scale, window, **seen)


@settings(max_examples=60, deadline=None)
@given(
    st.data(),
    st.sampled_from(FORMS),
    st.builds(
        HeadSizes,
        st.integers(1, 2),
        st.sampled_from([1, 2, 3, 4, 8, 17]),
        st.sampled_from(HEAD_DIMS),
    ),
    st.integers(1, 150),
    st.sampled_from([0, 0, 1, 5, 30, 64]),
    st.booleans(),
    st.sampled_from([0.0, 2.0]),
    st.integers(1, 3),
)
def test_a_row_has_the_bits_of_its_query_alone_however_the_prompt_is_cut(
    data: st.DataObject,
    form: tuple[torch.dtype, bool],
    heads: HeadSizes,
    length: int,
    window: int,
    has_sinks: bool,
    cap: float,
    threads: int,
) -> None:
    dtype, uses_tiles = form
    prompt = Prompt(length, heads, dtype, seed=length)
    sinks = torch.randn(heads.kv * heads.group) if has_sinks else None
    seen = {"sinks": sinks, "score_cap": cap}
    sizes = st.sampled_from([16, 32, 64])
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=4))) if length > 1 else []
    with _form(uses_tiles):
        alone = prompt.decoded(data.draw(sizes), window, **seen)
    with _form(uses_tiles, threads):
        found = prompt.prefilled(cuts, data.draw(sizes), window, **seen)
    assert torch.equal(found, alone)
    bound = TOLERANCE[dtype]
    expected = prompt.expected(window, **seen)
    torch.testing.assert_close(found.double(), expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("window", [0, SPLIT + 100])
@pytest.mark.parametrize(
    "heads", [HeadSizes(1, 1, 64), HeadSizes(2, 3, 64), HeadSizes(1, 4, 80)], ids=str
)
def test_splits_are_the_same_in_chunks_of_any_size(
    heads: HeadSizes, window: int, dtype: torch.dtype
) -> None:
    prompt = Prompt(2 * SPLIT + 70, heads, dtype)
    whole = prompt.prefilled([], 64, window)
    assert torch.equal(prompt.prefilled([100, 101, SPLIT, 2 * SPLIT + 5], 16, window), whole)
    assert torch.equal(prompt.prefilled([SPLIT - 1, SPLIT + 300], 32, window), whole)
    keys, values, table = prompt.pages(64, prompt.length)
    places = torch.tensor([0, 63, SPLIT - 1, SPLIT, SPLIT + 99, 2 * SPLIT - 1, 2 * SPLIT + 69])
    asked = prompt.q[places], keys, values, table.expand(len(places), -1), places
    assert torch.equal(paged_attention_decode(*asked, prompt.scale, window), whole[places])


def test_the_requests_of_a_step_do_not_change_a_row(dtype: torch.dtype) -> None:
    prompts = [Prompt(length, HeadSizes(2, 3, 64), dtype, seed=length) for length in (130, 40, 77)]
    pages = [prompt.pages(32, prompt.length) for prompt in prompts]
    width, slots, rows = max(len(p[2][0]) for p in pages), 0, []
    for keys, _, table in pages:
        padding = torch.full((1, width - table.shape[1]), -1)
        rows.append(torch.cat((table + slots, padding), dim=1))
        slots += len(keys)
    keys, values = torch.stack(
        (torch.cat([p[0] for p in pages]), torch.cat([p[1] for p in pages])), 1
    ).unbind(1)
    starts = (64, 0, 33)
    spans = [(start, prompt.length) for start, prompt in zip(starts, prompts, strict=True)]
    q = torch.cat([prompt.q[start:] for start, prompt in zip(starts, prompts, strict=True)])
    together = paged_attention_prefill(q, keys, values, torch.cat(rows), spans, prompts[0].scale)
    alone = [p.prefilled([], 16, 0)[start:] for start, p in zip(starts, prompts, strict=True)]
    assert torch.equal(together, torch.cat(alone))


def test_two_threads_give_a_chunk_the_bits_of_one(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    prompt = Prompt(200, HeadSizes(2, 3, 80), dtype)

    alone, shared = answers_of_one_thread_and_two(
        monkeypatch, attend_loop, lambda: prompt.prefilled([], 16, 50)
    )
    assert alone.equal(shared)


@pytest.mark.parametrize("name", ["keys", "values"])
def test_nan_in_a_key_or_value_is_nan_from_its_position_on(name: str, dtype: torch.dtype) -> None:
    prompt = Prompt(150, HeadSizes(1, 2, 64), dtype)
    getattr(prompt, name)[77, 0, 5] = torch.nan
    found = prompt.prefilled([], 16, 0)
    clean = Prompt(150, HeadSizes(1, 2, 64), dtype).prefilled([], 16, 0)
    assert torch.equal(found[:77], clean[:77])
    assert found[77:, :, 5].isnan().all()
    assert found[77:].isnan().all() == (name == "keys")


@pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("sizes", [(1, 20, 6), (16, 64, 32), (40, 48, 16)], ids=str)
def test_a_latent_row_has_the_bits_of_its_token_alone(
    sizes: tuple[int, int, int], dtype: torch.dtype, has_sinks: bool
) -> None:
    """However its prompt is cut, in decode, and where its places are all that it sees."""
    (heads, latent_dim, rope_dim), length, page_size = sizes, SPLIT + 80, 32
    slab = torch.randn(30, page_size + 1, latent_dim + rope_dim).to(dtype)
    pages, table = slab[:, :page_size], torch.randperm(30)[None]
    sinks = torch.randn(heads) if has_sinks else None
    q, sees = torch.randn(length, heads, latent_dim + rope_dim).to(dtype), (latent_dim, 0.2, sinks)
    whole = latent_attention_prefill(q, pages, table, [(0, length)], *sees)
    for cut in (1, 70, SPLIT, SPLIT + 33):
        spans = [(0, cut), (cut, length)]
        tables = table.expand(2, -1)
        cut_whole = latent_attention_prefill(q, pages, tables, spans, *sees)
        assert torch.equal(cut_whole, whole)
        part = latent_attention_prefill(q[cut:], pages, table, spans[1:], *sees)
        assert torch.equal(part, whole[cut:])
    positions = torch.tensor([0, 69, SPLIT, length - 1])
    tables = table.expand(len(positions), -1)
    decoded = latent_attention_decode(q[positions], pages, tables, positions, *sees)
    assert torch.equal(decoded, whole[positions])
    padded = torch.tensor([5, -1, 70])
    decoded = latent_attention_decode(q[padded], pages, table.expand(3, -1), padded, *sees)
    assert torch.equal(decoded[[0, 2]], whole[[5, 70]])
    assert not decoded[1].any()


def test_a_chunk_attends_to_the_rounded_keys_that_it_has_stored(dtype: torch.dtype) -> None:
    """So pages of codes have the same answers in any chunks: those of the stored values."""
    prompt, page_size = Prompt(100, HeadSizes(2, 2, 64), dtype), 16
    codes = torch.zeros(7, 2, 2, page_size, 64, dtype=torch.uint8).view(CODE_DTYPE).unbind(1)
    pages = CodedAttentionState(*codes, *torch.ones(2, 7, 2, page_size).unbind())
    table, answers = torch.randperm(7)[None], []
    for start, end in ((0, 33), (33, 34), (34, 100)):
        positions = torch.arange(start, end)
        rows = torch.zeros_like(positions)
        pages.write(prompt.keys[start:end], prompt.values[start:end], table, rows, positions)
        opened, places = pages.opened(table, dtype)
        asked = prompt.q[start:end], opened.key_pages, opened.value_pages, places, [(start, end)]
        answers.append(paged_attention_prefill(*asked, prompt.scale))
    prompt.keys, prompt.values = (coded(t).values(dtype) for t in (prompt.keys, prompt.values))
    assert torch.equal(torch.cat(answers), prompt.prefilled([], 64, 0))
