"""Inkling's published layout: other names, rows of gate and up that take turns, padded tables."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.model.comparison import random_config
from tests.model.differences import difference
from tests.model.families.shapes import VOCAB_SIZE
from tests.model.paged_run import PagedRun
from tests.model.ragged import ragged_logits, random_prompt
from tests.model.test_image_models import oracle_logits
from tests.tiny_models import save_drawn
from transformers import AutoModelForImageTextToText, InklingConfig

from ferryman.model.layers import profiled_attention
from ferryman.model.layers.profiled_attention import grow, growth_of
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.model.shapes.attention_shapes import LogGrowth

PUBLISHED = {
    "model.llm.embed.weight",
    "model.llm.embed_norm.weight",
    "model.llm.unembed.weight",
    "model.llm.layers.0.attn.wq_du.weight",
    "model.llm.layers.0.attn.k_sconv.weight",
    "model.llm.layers.0.mlp_sconv.weight",
}
TURNING = (".mlp.experts.w13_weight", ".mlp.shared_experts.shared_w13_weight", ".w13_dn.weight")


@pytest.mark.parametrize("seed", [1, 2])
def test_a_published_folder_is_answered_as_by_the_whole_model(seed: int, tmp_path: Path) -> None:
    text = random_config("inkling", seed).to_dict()
    text.pop("model_type")
    vision = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 2}
    config = InklingConfig(
        text_config=text,
        vision_config=vision,
        audio_config={"n_mel_bins": 2, "mel_vocab_size": 4},
        image_token_id=VOCAB_SIZE - 1,
        audio_token_id=VOCAB_SIZE - 1,
    )
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    save_drawn(tmp_path, model, seed=seed)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert names >= PUBLISHED
    assert all(any(name.endswith(turning) for name in names) for turning in TURNING)
    prompt = random_prompt(random.Random(seed), 40, VOCAB_SIZE - 1)
    run = PagedRun(load_model(tmp_path, LoadOptions("float64", page_size=8)), 0)
    (logits,) = ragged_logits(run, [prompt], random.Random(3))
    assert difference(logits, oracle_logits(tmp_path, prompt)) < 1e-12


def test_growth_has_the_same_bits_for_any_number_of_positions() -> None:
    growth, positions = LogGrowth(0.1, 7), torch.arange(-1, 200)
    whole = growth_of(growth, positions, torch.float32)
    assert whole[:7].eq(1.0).all()
    single = [growth_of(growth, position[None], torch.float32) for position in positions]
    assert torch.equal(torch.cat(single), whole)


def test_numbers_grow_in_pieces_without_a_copy_of_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, factors = torch.randn(7, 3, 5).to(torch.bfloat16), torch.rand(7) + 1
    expected = (numbers.float() * factors[:, None, None]).to(torch.bfloat16)
    monkeypatch.setattr(profiled_attention, "GROWN_NUMBERS", 2 * 15)
    grown = grow(numbers, factors)
    assert grown.data_ptr() == numbers.data_ptr()
    assert torch.equal(grown, expected)
