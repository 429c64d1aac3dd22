"""Attention with profiles of distance: transformers' scores in float64, and equal bits for any cut.

The oracle of a term of distance is transformers' own module. On a card splits are short here, so
that a few keys make several of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.kernels.loop_versions import answers_of_one_thread_and_two
from tests.kernels.test_one_order_of_attention import HeadSizes, Prompt
from torch import Tensor
from transformers.models.inkling.modeling_inkling import InklingRelativeLogits

from ferryman_kernels.attention.splits import _split_attention_triton as split_attention
from ferryman_kernels.attention.splits import profiled_attention
from ferryman_kernels.attention.splits._profiled_attention_compiled import (
    _attend_loop,
    profiled_attention_compiled,
)
from ferryman_kernels.attention.splits._split_attention_triton import (
    split_decode_triton,
    split_prefill_triton,
)
from ferryman_kernels.attention.splits.profiled_attention import (
    profiled_attention_reference,
    profiled_decode,
    profiled_prefill,
)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tensors are the processor's")

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
PAGE, EXTENT, REL_DIM = 16, 50, 4
LOOP_LENGTH, CARD_LENGTH, CARD_SPLIT = 560, 135, 64
"""More than one split of the loop, and several of the card's."""

Given = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""q, profiles, keys, values and the table of one request."""


def given(prompt: Prompt, low: int, high: int) -> Given:
    """The queries from `low` to `high`, with no later key in a page."""
    pages = prompt.pages(PAGE, high)
    return prompt.q[low:high], profiles_of(prompt)[low:high], *pages


def profiles_of(prompt: Prompt) -> Tensor:
    """[tokens, q_heads, EXTENT] in the dtype of q."""
    states, bank = _drawn(prompt)
    return (states @ bank).to(prompt.q.dtype)


def _drawn(prompt: Prompt) -> tuple[Tensor, Tensor]:
    """Small numbers of eighths, whose products no dtype rounds."""
    draw = torch.Generator().manual_seed(11)
    states = torch.randint(-1, 2, (*prompt.q.shape[:2], REL_DIM), generator=draw).double()
    return states, torch.randint(-8, 9, (REL_DIM, EXTENT), generator=draw).double() / 8


def expected(prompt: Prompt, window: int) -> Tensor:
    states, bank = _drawn(prompt)
    module = InklingRelativeLogits(REL_DIM, EXTENT).double()
    module.proj.data.copy_(bank)
    at = torch.arange(prompt.length)
    terms = module(states[None], at, at)[0].detach()
    keys, values = (
        part.double().repeat_interleave(prompt.heads.group, 1)
        for part in (prompt.keys, prompt.values)
    )
    scores = torch.einsum("qhd,khd->hqk", prompt.q.double(), keys) * prompt.scale + terms
    hidden = at[None] > at[:, None]
    if window:
        hidden |= at[None] <= at[:, None] - window
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


def by_token(run: Callable[..., Tensor], prompt: Prompt, window: int) -> Tensor:
    """All queries as tokens of one step."""
    q, profiles, keys, values, table = given(prompt, 0, prompt.length)
    tables, at = table.expand(len(q), -1).contiguous(), torch.arange(prompt.length)
    return run(q, profiles, keys, values, tables, at, prompt.scale, window)


def by_chunk(prompt: Prompt, cuts: list[int], window: int) -> Tensor:
    rows = []
    for low, high in zip([0, *cuts], [*cuts, prompt.length], strict=True):
        asked = *given(prompt, low, high), ((low, high),)
        places = torch.zeros(high - low, dtype=torch.int64), torch.arange(low, high)
        rows.append(profiled_prefill(*asked, *places, prompt.scale, window))
    return torch.cat(rows)


@pytest.mark.parametrize("window", [0, 1, 33, 530])
@pytest.mark.parametrize("heads", [HeadSizes(2, 1, 24), HeadSizes(1, 3, 80)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("run", [profiled_attention_reference, profiled_decode])
def test_scores_have_the_term_of_their_distance(
    run: Callable[..., Tensor], dtype: torch.dtype, heads: HeadSizes, window: int
) -> None:
    prompt = Prompt(LOOP_LENGTH, heads, dtype)
    found = by_token(run, prompt, window)
    assert found.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        found.double(), expected(prompt, window), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("window", [0, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_prompt_in_any_chunks_has_the_bits_of_single_tokens(
    dtype: torch.dtype, window: int
) -> None:
    pytest.importorskip("numba")
    prompt = Prompt(LOOP_LENGTH, HeadSizes(2, 3, 24), dtype)
    whole = by_chunk(prompt, [], window)
    assert torch.equal(by_chunk(prompt, [5, 300, 511, 513], window), whole)
    assert torch.equal(by_token(profiled_decode, prompt, window), whole)


def test_one_thread_and_two_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    prompt = Prompt(LOOP_LENGTH, HeadSizes(2, 2, 16), torch.float32)
    alone, shared = answers_of_one_thread_and_two(
        monkeypatch, _attend_loop, lambda: by_token(profiled_attention_compiled, prompt, 0)
    )
    assert torch.equal(alone, shared)


@pytest.mark.parametrize("window", [0, 40])
def test_queries_in_pieces_have_the_bits_of_a_whole_step(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece of three queries at most, by sums of the splits that they see and by pages."""
    pytest.importorskip("numba")
    prompt = Prompt(LOOP_LENGTH, HeadSizes(2, 2, 16), torch.float32)
    whole = by_chunk(prompt, [], window)
    splits, pages = 2 if window else 3, -(-LOOP_LENGTH // PAGE)
    each = splits * prompt.q.shape[1] * (prompt.q.shape[2] + 2) + pages
    sizes = []

    def counted(q: Tensor, *asked: Any) -> Tensor:
        sizes.append(len(q))
        return profiled_attention_compiled(q, *asked)

    monkeypatch.setattr(profiled_attention, "profiled_attention_compiled", counted)
    monkeypatch.setattr(profiled_attention, "NUMBERS", 3 * each)
    assert torch.equal(by_chunk(prompt, [300], window), whole)
    assert torch.equal(by_token(profiled_decode, prompt, window), whole)
    assert max(sizes) == 3


def test_a_query_that_pads_a_batch_gets_zeros() -> None:
    prompt = Prompt(20, HeadSizes(1, 2, 16), torch.float32)
    q, profiles, keys, values, table = given(prompt, 0, 20)
    tables, at = table.expand(2, -1).contiguous(), torch.tensor([-1, 3])
    asked = q[2:4], profiles[2:4], keys, values, tables, at, prompt.scale
    for run in (profiled_decode, profiled_attention_reference):
        assert not run(*asked, 0)[0].any()
        torch.testing.assert_close(run(*asked, 0)[1].double(), expected(prompt, 0)[3])


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_card_has_the_same_terms_in_prefill_and_in_decode(
    dtype: torch.dtype, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_attention, "SPLIT_KEYS", CARD_SPLIT)
    prompt = Prompt(CARD_LENGTH, HeadSizes(1, 3, 24), dtype)
    q, profiles, keys, values, table = given(prompt, 0, CARD_LENGTH)
    span = ((0, CARD_LENGTH),)
    whole = split_prefill_triton(
        q, keys, values, table, span, prompt.scale, window, profiles=profiles
    )
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        whole.double(), expected(prompt, window), rtol=tolerance, atol=tolerance
    )
    at = torch.tensor([0, 17, 63, 64, 134])
    tables = table.expand(len(at), -1).contiguous()
    single = split_decode_triton(
        q[at], keys, values, tables, at, prompt.scale, window, profiles=profiles[at]
    )
    assert torch.equal(single, whole[at])
