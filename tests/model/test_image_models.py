"""The text model in a folder whose model also reads images gives the logits of transformers' whole.

The folder is what transformers writes for the whole model: a nested config, longer names of
tensors, experts as they are published.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.model.comparison import random_config
from tests.model.differences import difference
from tests.model.families.shapes import VOCAB_SIZE
from tests.model.paged_run import PagedRun
from tests.model.ragged import ragged_logits, random_prompt
from tests.oracle import Float64Mode
from tests.tiny_models import save_drawn
from transformers import (
    AutoModelForImageTextToText,
    Exaone4_5_Config,
    Kimi_K25Config,
    Llama4Config,
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model

VISION: Mapping[str, Any] = {
    "depth": 1,
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "num_attention_heads": 2,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
TOKENS_OF_IMAGES = ("image_token_id", "video_token_id", "vision_start_token_id")

SEEDS: Mapping[str, int] = {"deepseek_v3": 10}
"""A seed with a latent of queries: without one, transformers 5.23 takes the text's q_proj for its
tower's and cannot save Kimi K2.5."""


def whole_config(kind: type[PretrainedConfig], family: str) -> PretrainedConfig:
    """A model with images around a random text model of `family` without windows, which these do
    not have. No prompt has tokens of images."""
    text = random_config(family, SEEDS.get(family, 1)).to_dict()
    for name in ("model_type", "layer_types", "sliding_window", "use_sliding_window"):
        text.pop(name, None)
    if kind is Exaone4_5_Config:
        text["model_type"] = family
    head_dim = text.get("head_dim", text["hidden_size"] // text["num_attention_heads"])
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [1, 1, head_dim // 2 - 2],
    }
    vision = {**VISION, "out_hidden_size": text["hidden_size"]}
    tokens = dict.fromkeys(TOKENS_OF_IMAGES, VOCAB_SIZE - 1)
    is_tied = text["tie_word_embeddings"]
    return kind(text_config=text, vision_config=vision, tie_word_embeddings=is_tied, **tokens)


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        pytest.param(Qwen2_5_VLConfig, "qwen2", id="Qwen2.5-VL"),
        pytest.param(Qwen3VLConfig, "qwen3", id="Qwen3-VL"),
        pytest.param(Qwen3VLMoeConfig, "qwen3_moe", id="Qwen3-VL with experts"),
        pytest.param(Llama4Config, "llama4", id="Llama 4"),
        pytest.param(Exaone4_5_Config, "exaone4", id="EXAONE 4.5"),
        pytest.param(Kimi_K25Config, "deepseek_v3", id="Kimi K2.5"),
    ],
)
def test_text_is_answered_as_by_the_whole_model(
    kind: type[PretrainedConfig], family: str, tmp_path: Path
) -> None:
    config = whole_config(kind, family)
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    save_drawn(tmp_path, model, seed=7)
    _with_published_names(tmp_path / "model.safetensors")
    prompt = random_prompt(random.Random(5), 40, VOCAB_SIZE - 1)
    run = PagedRun(load_model(tmp_path, LoadOptions("float64", page_size=8)), 0)
    (found,) = ragged_logits(run, [prompt], random.Random(3))
    assert difference(found, oracle_logits(tmp_path, prompt)) < 1e-12


def _with_published_names(file: Path) -> None:
    """Renames layers of Kimi K2.5's text: transformers 5.23 saves them as blocks of its tower, and
    reads the published names."""
    saved, renamed = "language_model.model.blocks.", "language_model.model.layers."
    tensors = {name.replace(saved, renamed): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})


def oracle_logits(folder: Path, prompt: list[int]) -> torch.Tensor:
    options: Mapping[str, Any] = {
        "attn_implementation": "eager",
        "experts_implementation": "eager",
    }
    mode = Float64Mode()
    with mode, torch.inference_mode():
        whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64, **options)
        logits: torch.Tensor = whole.eval()(torch.tensor([prompt]), use_cache=False).logits[0]
    return logits.clone()
