"""Variants of Llama, GPT-2 and mixtures are the same models from their folders and their files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.gguf_models.compared_file import (
    assert_blocks_stay,
    assert_logits_are_the_folders,
    assert_trunk_is_the_folders,
    logits_of,
    prompt_of,
    with_panels,
)
from tests.gguf_models.files import write
from tests.gguf_models.variant_conversion import variant_parts, write_variant
from tests.gguf_models.variant_models import VARIANTS
from tests.tiny_models import save_random
from torch import Tensor

from ferryman.errors import ConfigError
from ferryman.gguf.model_file import read_model
from ferryman.model.config import load_config
from ferryman.model.shapes.config_fields import read_fields
from ferryman.model.weights.gguf_checkpoint import open_gguf

GROWTH = "mistral4.attention.temperature_scale"


@pytest.fixture(params=VARIANTS)
def folder_and_file(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    architecture, config = VARIANTS[request.param]
    folder = save_random(tmp_path / "folder", config, seed=1)
    return folder, write_variant(folder, tmp_path / "tiny.gguf", architecture)


def logits(model: Path, dtype: str) -> Tensor:
    return logits_of(model, dtype, prompt_of(40), (30, 37))


def test_logits_and_config_are_those_of_the_folder(folder_and_file: tuple[Path, Path]) -> None:
    """Logarithms are rounded to float32 once."""
    assert_trunk_is_the_folders(*folder_and_file)
    assert_logits_are_the_folders(*folder_and_file, logits, tolerance=1e-6)


@with_panels
def test_weights_in_blocks_stay_in_them(
    folder_and_file: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, file = folder_and_file
    parts = variant_parts(folder, read_model(file).metadata.architecture)
    assert_blocks_stay(file, parts, logits, 0.8, monkeypatch)


def test_layers_with_indexers_are_told_by_their_tensors(tmp_path: Path) -> None:
    """So they are in files of GLM-5.2 that lack the key."""
    architecture, config = VARIANTS["glm-dsa"]
    folder = save_random(tmp_path / "folder", config, seed=1)
    metadata, tensors = variant_parts(folder, architecture)
    del metadata["glm-dsa.attention.indexer.types"]
    file: Any = load_config(write(tmp_path / "tiny.gguf", metadata, tensors))
    assert file.has_indexer == (True, False, True, False)


@pytest.mark.parametrize(("keys", "expected"), [({}, 0.1), ({GROWTH: 0.5}, 0.5)], ids=str)
def test_queries_of_mistral_4_grow_as_published_if_a_file_does_not_say(
    keys: dict[str, Any], expected: float, tmp_path: Path
) -> None:
    file: Any = load_config(changed_file(tmp_path, "mistral4", keys))
    growth = file.attention.growth
    assert (growth.beta, growth.length) == (expected, 16)


def test_llama_4_without_chunks_is_refused_by_its_key(tmp_path: Path) -> None:
    architecture, config = VARIANTS["llama4"]
    folder = save_random(tmp_path / "folder", config, seed=1)
    metadata, tensors = variant_parts(folder, architecture)
    keys = {**metadata, "llama4.attention.sliding_window": 0}
    file = write(tmp_path / "tiny.gguf", keys, tensors)
    with pytest.raises(ConfigError, match=r"sliding_window' must be left out: layers have chunks"):
        load_config(file)


def changed_file(folder: Path, name: str, keys: dict[str, Any], *without: str) -> Path:
    """The file of a variant with other keys."""
    architecture, config = VARIANTS[name]
    saved = save_random(folder / "folder", config, seed=1)
    metadata, tensors = variant_parts(saved, architecture)
    kept = {key: value for key, value in metadata.items() if key not in without}
    return write(folder / "tiny.gguf", {**kept, **keys}, tensors)


@pytest.mark.parametrize("numbers", [[0.5] * 3, [1] * 4, 0.5], ids=["fewer", "whole", "one"])
def test_numbers_of_an_activation_are_there_for_each_layer(numbers: Any, tmp_path: Path) -> None:
    file = changed_file(tmp_path, "apertus", {"xielu.beta": numbers})
    with pytest.raises(ConfigError, match=r"'xielu.beta' must be an array of 4 numbers of 32 bits"):
        open_gguf(file)


def test_numbers_of_an_activation_that_are_missing_are_named(tmp_path: Path) -> None:
    file = changed_file(tmp_path, "apertus", {}, "xielu.eps")
    with pytest.raises(ConfigError, match=r"'xielu.eps' must be an array .* it is 'missing'"):
        open_gguf(file)


REFUSED: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "queries that grow": (
        "deepseek32",
        {"deepseek32.attention.temperature_scale": 0.1},
        "temperature_scale' must be 0, or left out: queries do not grow in this model",
    ),
    "norms of squares": (
        "cohere2moe",
        {"cohere2moe.attention.layer_norm_rms_epsilon": 1e-5},
        "must be left out: only norms around the mean are read",
    ),
    "another choice": (
        "cohere2moe",
        {"cohere2moe.expert_gating_func": 4},
        r"must be 1 \(softmax\) or 2 \(sigmoid\); it is 4",
    ),
    "turning in windows": (
        "laguna",
        {"laguna.rope.dimension_count_swa": 20},
        "must be 1 to 16; it is 20",
    ),
    "key heads": (
        "mimo2",
        {"mimo2.attention.head_count_kv": [2, 4, 2, 4]},
        "must be alike in all layers with a window",
    ),
    "sigmoids": (
        "mistral4",
        {"mistral4.expert_gating_func": 2},
        r"must be 1 \(softmax\), or left out; it is 2",
    ),
    "heads that turn whole": (
        "minicpm3",
        {"minicpm3.attention.key_length": 8},
        "must be more than the 8 channels that turn; it is 8",
    ),
    "key heads in windows": (
        "step35",
        {"step35.attention.head_count_kv": [2, 4, 4, 2]},
        "must be alike in all layers",
    ),
    "a softmax": (
        "step35",
        {"step35.expert_gating_func": 1},
        r"must be 2 \(sigmoid\), or left out; it is 1",
    ),
    "choice by a softmax": (
        "minimax-m3",
        {"minimax-m3.expert_gating_func": 1},
        r"must be 2 \(sigmoid\); it is 1",
    ),
    "shares that are not normed": (
        "minimax-m3",
        {"minimax-m3.expert_weights_norm": False},
        "must be true; it is False",
    ),
    "several shared experts": (
        "minimax-m3",
        {"minimax-m3.expert_shared_count": 2},
        "'n_shared_experts' must be 1",
    ),
    "gates with limits": (
        "bailingmoe3",
        {"bailingmoe3.swiglu_clamp_exp": [0.0, 7.0, 7.0, 7.0]},
        "must be left out, or 0 in all layers",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_key_that_is_not_understood_is_refused(name: str, tmp_path: Path) -> None:
    variant, keys, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        load_config(changed_file(tmp_path, variant, keys))


def test_layers_of_minimax_are_told_by_their_tensors(tmp_path: Path) -> None:
    """llama.cpp takes every eighth for one of softmax attention where a file says nothing."""
    architecture, config = VARIANTS["minimax-01"]
    kinds = ["full_attention", "linear_attention"] * 4
    changed = type(config)(**{**config.to_dict(), "layer_types": kinds})
    folder = save_random(tmp_path / "folder", changed, seed=1)
    file = write_variant(folder, tmp_path / "tiny.gguf", architecture)
    assert list(read_fields(file / "config.json").words("layer_types")) == kinds


def test_kinds_of_layers_that_a_file_names_count(tmp_path: Path) -> None:
    """A later converter may name them; without names every fourth layer has no window."""
    named = {"laguna.attention.sliding_window_pattern": [True, False, True, True, False]}
    file: Any = load_config(changed_file(tmp_path, "laguna", named))
    assert [bool(shape.window_len) for shape in file.attention] == [True, False, True, True, False]


def test_numbers_of_drafting_layers_of_step_3_5_are_left_out(tmp_path: Path) -> None:
    """Its lists have entries of the layers for drafts, too."""
    keys = {
        "block_count": 5,
        "nextn_predict_layers": 1,
        "attention.head_count": [4, 6, 6, 4, 6],
        "attention.head_count_kv": [2] * 5,
        "attention.sliding_window_pattern": [False, True, True, False, True],
        "swiglu_clamp_exp": [0.0, 0.25, 0.0, 0.5, 1.5],
        "swiglu_clamp_shexp": [0.25, 0.0, 0.0, 0.125, 1.5],
    }
    by_name = {f"step35.{key}": value for key, value in keys.items()}
    drafting = changed_file(tmp_path / "drafting", "step35 with limits", by_name)
    plain = changed_file(tmp_path / "plain", "step35 with limits", {})
    assert load_config(drafting) == load_config(plain)
