"""Kolibri 1: a folder's own names of norms and biases, and a choice that a sigmoid would change."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.model.comparison import random_config
from tests.model.families.shapes import VOCAB_SIZE
from tests.model.paged_run import PagedRun, Part
from tests.model.ragged import random_prompt
from tests.tiny_models import save_random
from torch import Tensor
from transformers import Kolibri1Config

from ferryman.errors import ConfigError
from ferryman.model.config import load_config
from ferryman.model.layers.expert_router import sigmoid_by_biased_score
from ferryman.model.layers.transformer import TransformerConfig
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.model.shapes.attention_shapes import RotaryPositions
from ferryman.model.shapes.feed_forward_shapes import BiasedScoreRouting
from ferryman.model.weights.linear import make_linear

NAMES = {
    "moe.router.expert_bias": "mlp.gate.e_score_correction_bias",
    "post_attn_norm": "post_self_attn_layernorm",
    "post_ffn_norm": "post_mlp_layernorm",
}
"""Published names, and those of transformers in memory."""


def logits(folder: Path) -> Tensor:
    run = PagedRun(load_model(folder, LoadOptions("float32", page_size=16)), 1)
    prompt = random_prompt(random.Random(1), 40, VOCAB_SIZE)
    (found,) = run.prefill([Part(run.start(), prompt)])
    return found


def test_names_of_published_folders_and_of_transformers_are_read_alike(tmp_path: Path) -> None:
    save_random(tmp_path, random_config("kolibri1", 1), 1)
    expected, path = logits(tmp_path), tmp_path / "model.safetensors"
    tensors = load_file(path)
    for published, in_memory in NAMES.items():
        assert any(published in name for name in tensors), "transformers writes published names"
        tensors = {name.replace(published, in_memory): t for name, t in tensors.items()}
    save_file(tensors, path, {"format": "pt"})
    assert torch.equal(logits(tmp_path), expected)


PUBLISHED = Path(__file__).parent / "published" / "Aleph-Alpha--Kolibri-1.json"


def with_windows(folder: Path, **windows: object) -> TransformerConfig:
    """The published config, with the length of its windows missing or as it is in `windows`."""
    raw = json.loads(PUBLISHED.read_text())["config"]
    del raw["sliding_window"]
    raw |= windows
    (folder / "config.json").write_text(json.dumps(raw))
    config = load_config(folder)
    assert isinstance(config, TransformerConfig)
    return config


def test_a_missing_window_is_that_of_transformers(tmp_path: Path) -> None:
    config = with_windows(tmp_path)
    windows = {shape.window_len for shape in config.attention}
    assert windows == {0, Kolibri1Config().sliding_window}


@pytest.mark.parametrize("words", [None, ["sliding_attention", "full_attention"]])
def test_windows_of_no_length_are_refused(words: list[str] | None, tmp_path: Path) -> None:
    changed = {"sliding_window": None, "layer_types": words, "num_hidden_layers": 2}
    with pytest.raises(ConfigError, match="sliding_window"):
        with_windows(tmp_path, **changed)


def test_layers_without_any_window_turn(tmp_path: Path) -> None:
    changed = {"sliding_window": None, "layer_types": ["full_attention"], "num_hidden_layers": 1}
    (shape,) = with_windows(tmp_path, **changed).attention
    assert isinstance(shape.positions, RotaryPositions)


def test_the_bias_is_added_to_scores_and_not_to_their_sigmoids() -> None:
    """Of sigmoids plus bias the second expert would be the greater: 0.27 + 0.5 against 0.73."""
    score = make_linear(torch.eye(2))
    routing = BiasedScoreRouting(shares_sum_to_one=False)
    router = sigmoid_by_biased_score(score, torch.tensor([0.0, 0.5]), 1, routing)
    shares, chosen = router(torch.tensor([[1.0, -1.0]]))
    assert chosen.tolist() == [[0]]
    assert torch.allclose(shares, torch.tensor([[1.0]]).sigmoid())
