"""ZAYA's attention: heads as short as rounding errors, and convolutions over a resumed position."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tests.model.families.zaya import zaya
from tests.model.paged_run import PagedRun, Part
from tests.model.ragged import random_prompt
from tests.oracle import load_oracle
from tests.tiny_models import save_random
from transformers import ZayaConfig
from transformers.models.zaya.modeling_zaya import ZayaQKNorm

from ferryman.model.layers.convolved_attention import LengthenedHeads
from ferryman.model.layers.rotation import without_rotary
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model

HEAD_DIM, KV_HEADS = 8, 2
PAGE_SIZE = 4


@pytest.mark.parametrize("length", [0.0, 1e-30, 1e-9, 1e-7, 1e-3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_head_shorter_than_epsilon_is_as_long_as_transformers_makes_it(
    length: float, dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(3)
    q, k = (
        torch.randn(5, heads, HEAD_DIM, generator=draw, dtype=torch.float64).mul(length).to(dtype)
        for heads in (2 * KV_HEADS, KV_HEADS)
    )
    norm = ZayaQKNorm(ZayaConfig(head_dim=HEAD_DIM, num_key_value_heads=KV_HEADS)).to(dtype)
    lengths = torch.tensor([0.7, -1.3], dtype=dtype)
    norm.temp.data.copy_(lengths)
    ours = LengthenedHeads(torch.ones(HEAD_DIM, dtype=dtype), lengths[:, None], without_rotary)
    for made, expected in zip(ours(q, k, torch.arange(5)), norm(q[None], k[None]), strict=True):
        torch.testing.assert_close(made, expected[0], rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("widths", [(2, 1), (2, 2), (3, 3)], ids=str)
@pytest.mark.parametrize("position", [PAGE_SIZE, 2 * PAGE_SIZE])
def test_a_resumed_position_has_the_last_inputs_of_both_convolutions(
    widths: tuple[int, int], position: int, tmp_path: Path
) -> None:
    config = zaya(random.Random("resumed"))
    config.cca_time0, config.cca_time1 = widths
    config.layer_types = ["hybrid"] * config.num_hidden_layers
    save_random(tmp_path, config, seed=5)
    prompt = random_prompt(random.Random(1), 3 * PAGE_SIZE + 1, config.vocab_size)
    run = PagedRun(load_model(tmp_path, LoadOptions("float64", page_size=PAGE_SIZE)))
    lane, snapshot = run.start(), run.free_slots.pop()
    run.prefill([Part(lane, prompt, {position: snapshot})])
    resumed = run.resume(snapshot, lane, position)
    (logits,) = run.prefill([Part(resumed, prompt[position:])])
    expected = load_oracle(tmp_path, torch.float64).logits(prompt)[position:]
    torch.testing.assert_close(logits, expected, rtol=0.0, atol=1e-12)
