"""dots3 note: published fields, state of two kinds, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.model.comparison import random_config
from tests.tiny_models import save_random

from ferryman.cache.manifest import Kind
from ferryman.errors import ConfigError
from ferryman.model.config import load_config
from ferryman.model.families.dots3_note import Dots3NoteConfig
from ferryman.model.shapes.attention_shapes import IndexShape, LatentShape, RotaryPositions
from ferryman.model.shapes.manifest import state_manifest

PUBLISHED = Path(__file__).parent / "published" / "dots-studio--dots3-note-prev.json"


def published() -> dict[str, Any]:
    config: dict[str, Any] = json.loads(PUBLISHED.read_text())["config"]
    return config


def read(folder: Path, raw: dict[str, Any]) -> Dots3NoteConfig:
    (folder / "config.json").write_text(json.dumps(raw))
    config = load_config(folder)
    assert isinstance(config, Dots3NoteConfig)
    return config


def theta(shape: LatentShape) -> float:
    assert isinstance(shape.positions, RotaryPositions)
    return shape.positions.theta


def test_the_published_config_has_layers_of_two_sizes(tmp_path: Path) -> None:
    config = read(tmp_path, published())
    full, window = config.attention[0], config.attention[2]
    assert config.index == IndexShape(64, 128, 2048, is_interleaved=True)
    assert [layer for layer, has in enumerate(config.has_index) if has] == [0, 1, *range(5, 46, 4)]
    assert (full.q_heads, full.latent_dim, full.plain_dim, full.rope_dim) == (128, 512, 128, 64)
    assert (window.q_heads, window.latent_dim, window.plain_dim) == (64, 1024, 192)
    assert (full.window_len, window.window_len) == (0, 513)
    assert (theta(full), theta(window)) == (8e7, 5e4)
    assert (full.query_scale, full.latent_scale, window.latent_scale) == (5**0.5, 10**0.5, 5**0.5)
    assert (full.scale, window.scale) == (192**-0.5, 256**-0.5)
    manifest = state_manifest(config, "bfloat16", 16, "")
    assert set(manifest.kinds) == {Kind.FULL, Kind.WINDOW}
    assert manifest.window_len == 513


def test_sizes_by_layer_are_those_of_the_published_fields(tmp_path: Path) -> None:
    """transformers writes the sizes of windows layer by layer, and the words of its own."""
    raw = published()
    windows = {
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 1024,
        "kv_lora_rank": 1024,
        "head_dim": 256,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    words = [word.replace("full", "indexed") for word in raw["layer_types"]]
    saved = {name: value for name, value in raw.items() if not name.startswith("swa_")} | {
        "layer_types": words,
        "sliding_window": raw["sliding_window_size"],
        "per_layer_config": {
            str(layer): windows for layer, word in enumerate(words) if word[0] == "s"
        },
        "rope_parameters": {
            "indexed_attention": {
                "rope_type": "default",
                "rope_theta": 80000000.0,
                "partial_rotary_factor": 0.25,
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": 50000.0,
                "partial_rotary_factor": 0.25,
            },
        },
    }
    del saved["use_dsa"]
    assert read(tmp_path, saved) == read(tmp_path, raw)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention_gate_type", "elementwise"),
        ("swa_attention_gate_type", "none"),
        ("scoring_func", "softmax"),
        ("topk_method", "group_limited_greedy"),
        ("num_key_value_heads", 8),
        ("index_head_dim", 32),
        ("moe_layer_freq", [1, 0]),
        ("layer_types", ["full_attention"]),
        ("swa_rope_theta", 0),
    ],
)
def test_what_the_layers_do_not_compute_is_refused_by_its_name(
    field: str, value: object, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=field):
        read(tmp_path, {**published(), field: value})


def test_latents_are_multiplied_unless_the_config_says_otherwise(tmp_path: Path) -> None:
    config = read(tmp_path, {**published(), "apply_mla_qkv_lora_rescale": False})
    assert {(shape.query_scale, shape.latent_scale) for shape in config.attention} == {(1.0, 1.0)}


def test_null_under_the_new_name_of_a_field_leaves_the_former_one(tmp_path: Path) -> None:
    config = read(tmp_path, {**published(), "sliding_window": None})
    assert {shape.window_len for shape in config.attention} == {0, 513}


def test_full_attention_has_no_index_where_the_config_says_so(tmp_path: Path) -> None:
    config = read(tmp_path, {**published(), "use_dsa": False})
    assert not any(config.has_index)
    assert len(config.states[0]) == 1


def test_a_random_model_has_all_sorts_of_layers(tmp_path: Path) -> None:
    """Windows, an index that chooses a part, and full attention: what other tests stand on."""
    folder = save_random(tmp_path, random_config("dots3_note", 9), 9)
    config = load_config(folder)
    assert isinstance(config, Dots3NoteConfig)
    kinds = {
        (shape.kind, has) for shape, has in zip(config.attention, config.has_index, strict=True)
    }
    assert len(kinds) == 3
    assert config.index.count < 40
