"""The tables of n-grams that a checkpoint names are those that its config implies (Qwen 4)."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tests.model.comparison import random_config
from tests.tiny_models import save_random

from ferryman.errors import ConfigError
from ferryman.model.footprint import weight_bytes
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.model.weights.gguf_checkpoint import open_model

SEED = 1
"""Of a model with n-grams."""
NAMES = ["ngram_heads_vocab_sizes", "ngram_heads_offsets"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_random(tmp_path / "written", random_config("qwen4_exp", SEED), SEED)


def load(folder: Path) -> None:
    load_model(folder, LoadOptions("float32", page_size=8))


@pytest.mark.parametrize("name", NAMES)
def test_other_tables_than_those_of_the_config_are_refused(folder: Path, name: str) -> None:
    load(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    changed = next(stored for stored in tensors if stored.endswith(name))
    save_file({**tensors, changed: tensors[changed] + 1}, path)
    with pytest.raises(ConfigError, match=rf"{name} .* ngram_vocab_size_base in config\.json"):
        load(folder)


def test_a_checkpoint_need_not_name_its_tables(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    without = {n: tensor for n, tensor in tensors.items() if not n.endswith(tuple(NAMES))}
    assert len(without) < len(tensors)
    save_file(without, path)
    load(folder)


def test_tables_are_sized_without_their_numbers(folder: Path) -> None:
    options = LoadOptions("float32", page_size=8)
    assert weight_bytes(folder, open_model(folder).tensors, options) > 0
