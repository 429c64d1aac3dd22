"""A row's token, its log probabilities and its rank are its own: the same bits alone and beside up
to 63 rows of other settings."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.row_bits import threads_of_torch
from tests.model.test_sampler import SamplerCase, penalised, some_case, tokens
from torch import Tensor

from ferryman.model.sampling.inverse_cdf import NUM_LIKELIEST
from ferryman.model.sampling.prompt_logprobs import PrefilledRows, ScoredRows, prompt_logprobs
from ferryman.model.sampling.sampler import log_probabilities

VOCABULARIES = (40, NUM_LIKELIEST + 1, 1000, 33_000)
"""Sorted whole, or the likeliest alone; the largest is what torch cuts for several threads."""


def sampled(logits: Tensor, cases: list[SamplerCase]) -> Tensor:
    """Penalised logits, tokens and log probabilities of each row, side by side."""
    chosen = torch.tensor(tokens(logits, cases))
    found = log_probabilities(logits, chosen, num_best=5)
    parts = penalised(logits, cases), chosen[:, None], found.values, found.token_ids
    return torch.cat([part.double() for part in parts], dim=1)


def scored(logits: Tensor, own: Tensor) -> Tensor:
    """Log probabilities and ranks of a prompt's own tokens."""
    prefilled = PrefilledRows(logits, lambda rows: rows)
    found = prompt_logprobs(prefilled, ScoredRows(torch.arange(len(logits)), own, 3))
    values, token_ids, ranks = (part.double() for part in found)
    return torch.cat((values, token_ids, ranks[:, None]), dim=1)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 64),
    vocab=st.sampled_from(VOCABULARIES),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 1000),
    ties=st.booleans(),
    data=st.data(),
)
def test_a_row_is_sampled_alike_in_every_batch(
    rows: int,
    vocab: int,
    dtype: torch.dtype,
    threads: int,
    seed: int,
    ties: bool,
    data: st.DataObject,
) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    cases = [some_case(rng) for _ in range(rows)]
    logits = 3 * torch.randn(rows, vocab, generator=generator)
    logits = (logits.round() if ties else logits).to(dtype)
    own = torch.randint(0, vocab, (rows,), generator=generator)
    place = data.draw(st.integers(0, rows - 1))
    alone = slice(place, place + 1)
    with threads_of_torch(threads):
        together, scores = sampled(logits, cases), scored(logits, own)
    assert torch.equal(sampled(logits[alone], cases[alone]), together[alone])
    assert torch.equal(scored(logits[alone], own[alone]), scores[alone])


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_leave_the_bits_of_one_long_row(threads: int) -> None:
    """torch cuts a sum of one row for its threads, and joins their parts."""
    generator = torch.Generator().manual_seed(1)
    case = SamplerCase(1.3, 0, 0.97, 0.0, 1.2, 0.1, 0.2, 7, [1, 2, 3], [5, 5])
    for _ in range(5):
        logits = 3 * torch.randn(1, 150_001, generator=generator)
        found = sampled(logits, [case])
        with threads_of_torch(threads):
            assert torch.equal(sampled(logits, [case]), found)
