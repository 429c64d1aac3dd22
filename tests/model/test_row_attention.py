"""DeepSeek-V4's attention to rows that are key and value, against transformers' module."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tests.model.deepseek_v4_mixer import VOCAB_SIZE, drawn_oracle, window_model
from tests.model.differences import difference
from tests.model.paged_run import PagedRun, Part
from tests.model.ragged import ragged_logits, random_prompt

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_windows_of_rows_are_attended_to_as_transformers_does(
    dtype: torch.dtype, page_size: int, tmp_path: Path
) -> None:
    oracle = drawn_oracle("sliding_attention", seed=3)
    run = PagedRun(window_model(oracle, tmp_path, dtype, page_size))
    rng = random.Random(page_size)
    prompts = [random_prompt(rng, length, VOCAB_SIZE) for length in (9, 70)]
    for made, prompt in zip(ragged_logits(run, prompts, rng), prompts, strict=True):
        assert difference(made, oracle.answer(prompt).logits) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_s_bits_do_not_depend_on_chunks(dtype: torch.dtype, tmp_path: Path) -> None:
    model = window_model(drawn_oracle("sliding_attention", seed=4), tmp_path, dtype, 4)
    rng = random.Random(7)
    prompts = [random_prompt(rng, length, VOCAB_SIZE) for length in (33, 60)]
    whole = PagedRun(model)
    expected = [whole.prefill([Part(whole.start(), prompt)])[0] for prompt in prompts]
    for made, right in zip(ragged_logits(PagedRun(model), prompts, rng), expected, strict=True):
        assert torch.equal(made, right)
