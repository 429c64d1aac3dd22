"""Models whose attention is at places that an index chooses are the same from folders and files."""

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
from tests.gguf_models.files import wide_array, write
from tests.gguf_models.sparse_conversion import sparse_parts, write_sparse
from tests.gguf_models.sparse_models import SPARSE
from tests.tiny_models import save_random
from torch import Tensor

from ferryman.errors import ConfigError
from ferryman.gguf.model_file import read_model
from ferryman.model.config import load_config
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.model.weights.gguf_checkpoint import open_gguf

PROMPT = prompt_of(300)
"""Longer than two blocks of 128 positions that share a key, of which some layers have any."""


@pytest.fixture(params=SPARSE)
def folder_and_file(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    architecture, config = SPARSE[request.param]
    folder = save_random(tmp_path / "folder", config, seed=1)
    return folder, write_sparse(folder, tmp_path / "tiny.gguf", architecture)


def logits(model: Path, dtype: str) -> Tensor:
    return logits_of(model, dtype, PROMPT, (190, 297))


def test_logits_and_config_are_those_of_the_folder(folder_and_file: tuple[Path, Path]) -> None:
    """Multiplied norms are rounded to float32 once."""
    assert_trunk_is_the_folders(*folder_and_file)
    assert_logits_are_the_folders(*folder_and_file, logits, tolerance=1e-5)


@with_panels
def test_weights_in_blocks_stay_in_them(
    folder_and_file: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, file = folder_and_file
    parts = sparse_parts(folder, read_model(file).metadata.architecture)
    assert_blocks_stay(file, parts, logits, 0.9, monkeypatch)


REFUSED: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "limits by layer": (
        "hy_v4",
        {"hy_v4.swiglu_clamp_exp": [0.5, 0.5, 0.5, 1.0]},
        "swiglu_clamp_exp' must be a number above 0, alike in all layers",
    ),
    "no limit": (
        "hy_v4",
        {"hy_v4.swiglu_clamp_exp": [0.0] * 4},
        "swiglu_clamp_exp' must be a number above 0, alike in all layers",
    ),
    "a layer without an indexer": (
        "dots3note",
        {"dots3note.attention.indexer.types": [True, False, False, False]},
        "types' must be true for all layers without a window, and no others",
    ),
    "heads by layer": (
        "dots3note",
        {"dots3note.attention.head_count": [4, 2, 2, 2]},
        "head_count' must be alike in all layers with a window, and in all others",
    ),
    "a softmax of experts": (
        "dots3note",
        {"dots3note.expert_gating_func": 1},
        r"expert_gating_func' must be 2 \(sigmoid\); it is 1",
    ),
    "another choice of experts": (
        "deepseek4",
        {"deepseek4.expert_gating_func": 2},
        r"expert_gating_func' must be 4 \(the root of softplus\); it is 2",
    ),
    "another limit of shared experts": (
        "deepseek4",
        {"deepseek4.swiglu_clamp_shexp": [7.0] * 5},
        "swiglu_clamp_shexp' must be that of routed experts, 0.5",
    ),
    "two tables of n-grams": (
        "qwen4exp",
        {"qwen4exp.ple.layers": [0, 1]},
        "ple.layers' must be one layer, of which the file has the table",
    ),
    "blocks by layer": (
        "qwen4exp",
        {"qwen4exp.attention.compress_ratios": [4, 0, 0, 8]},
        "compress_ratios' must be 0 or one number, alike in all layers of attention",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_key_that_is_not_understood_is_refused(name: str, tmp_path: Path) -> None:
    model, keys, message = REFUSED[name]
    architecture, config = SPARSE[model]
    folder = save_random(tmp_path / "folder", config, seed=1)
    metadata, tensors = sparse_parts(folder, architecture)
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path / "tiny.gguf", {**metadata, **keys}, tensors))


def test_a_hash_of_another_size_is_refused(tmp_path: Path) -> None:
    architecture, config = SPARSE["qwen4exp"]
    folder = save_random(tmp_path / "folder", config, seed=1)
    metadata, tensors = sparse_parts(folder, architecture)
    key = "qwen4exp.ple.layer_multipliers"
    file = write(tmp_path / "tiny.gguf", {**metadata, key: [1, 3, 5]}, tensors)
    with pytest.raises(ConfigError, match="must be an array of whole numbers of 64 bits"):
        open_gguf(file)
    file = write(tmp_path / "tiny.gguf", {**metadata, key: wide_array([1, 3])}, tensors)
    with pytest.raises(ConfigError, match=r"layer_multipliers' has shape \[2\]"):
        load_model(file, LoadOptions("float64", page_size=16))
