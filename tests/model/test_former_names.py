"""Configs by the names of their first publication mean what they mean by transformers' names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.model.comparison import random_config

from ferryman.errors import ConfigError
from ferryman.model.config import load_config
from ferryman.model.shapes.attention_shapes import AttentionShape, RotaryPositions
from ferryman.model.shapes.model_shapes import ModelConfig

SCALES = {
    "full_attn": "layernorm_full_attention",
    "linear_attn": "layernorm_linear_attention",
    "mlp": "layernorm_mlp",
}


def fields_of(family: str, architecture: str, seed: int) -> dict[str, Any]:
    return {**random_config(family, seed).to_dict(), "architectures": [architecture]}


def read(folder: Path, fields: Mapping[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(fields))
    return load_config(folder)


def test_minimax_is_read_by_its_published_names(tmp_path: Path) -> None:
    present = fields_of("minimax", "MiniMaxForCausalLM", 1)
    present |= {"head_dim": 16, "mlp_alpha_factor": 3.5, "linear_attn_beta_factor": 0.7}
    present["rope_parameters"] = {"rope_theta": 1e4, "rope_type": "default"}
    former = dict(present) | {"architectures": ["MiniMaxText01ForCausalLM"], "postnorm": True}
    for part, old in SCALES.items():
        for factor in ("alpha", "beta"):
            former[f"{old}_{factor}"] = former.pop(f"{part}_{factor}_factor")
    words = former.pop("layer_types")
    former["attn_type_list"] = [int(word == "full_attention") for word in words]
    assert read(tmp_path, former) == read(tmp_path, present)
    half = read(tmp_path, former | {"rotary_dim": 8})
    shapes = [shape for layer in half.states for shape in layer]
    turned = {shape.positions for shape in shapes if isinstance(shape, AttentionShape)}
    assert turned == {RotaryPositions(1e4, 8)}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attn_type_list", [2]),
        ("postnorm", False),
        ("shared_intermediate_size", 64),
        ("sliding_window", 64),
    ],
)
def test_fields_that_minimax_does_not_support_are_refused_by_name(
    field: str, value: object, tmp_path: Path
) -> None:
    present = fields_of("minimax", "MiniMaxForCausalLM", 1)
    read(tmp_path, present)
    with pytest.raises(ConfigError, match=field):
        read(tmp_path, present | {field: value})


def test_lfm2_counts_its_former_names_first(tmp_path: Path) -> None:
    present = fields_of("lfm2", "Lfm2ForCausalLM", 2)
    former = dict(present) | {"intermediate_size": 5, "tie_word_embeddings": None}
    former["block_ff_dim"] = present["intermediate_size"]
    former["tie_embedding"] = present["tie_word_embeddings"]
    words = former.pop("layer_types")
    former["full_attn_idxs"] = [i for i, word in enumerate(words) if word == "full_attention"]
    assert read(tmp_path, former) == read(tmp_path, present)


def test_kimis_layers_are_counted_from_one(tmp_path: Path) -> None:
    present = fields_of("kimi_linear", "KimiLinearForCausalLM", 2)
    former, words = dict(present), present["layer_types"]
    former["layer_types"] = None
    former["linear_attn_config"] = {
        "full_attn_layers": [i + 1 for i, word in enumerate(words) if word == "full_attention"],
        "kda_layers": [i + 1 for i, word in enumerate(words) if word == "linear_attention"],
        "num_heads": former.pop("linear_num_heads"),
        "head_dim": former.pop("linear_head_dim"),
        "short_conv_kernel_size": former.pop("linear_conv_kernel_dim"),
    }
    assert read(tmp_path, former) == read(tmp_path, present)
    former["linear_attn_config"]["kda_layers"] = []
    with pytest.raises(ConfigError, match="kda_layers"):
        read(tmp_path, former)


def test_the_rank_of_a_time_step_may_follow_from_the_width(tmp_path: Path) -> None:
    present = fields_of("jamba", "JambaForCausalLM", 3)
    rank = -(-present["hidden_size"] // 16)
    automatic = read(tmp_path, present | {"mamba_dt_rank": "auto"})
    assert automatic == read(tmp_path, present | {"mamba_dt_rank": rank})
