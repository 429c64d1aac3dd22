"""Variants of Llama, GPT-2 and mixtures are the same models from their folders and their files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.gguf_models.files import write
from tests.gguf_models.test_hybrids import in_blocks, logits, with_panels
from tests.gguf_models.variant_conversion import variant_parts, write_variant
from tests.gguf_models.variant_models import VARIANTS
from tests.tiny_models import save_random

from ferryman.errors import ConfigError
from ferryman.gguf.architectures import ARCHITECTURES
from ferryman.gguf.model_file import read_model
from ferryman.model.config import load_config
from ferryman.model.footprint import held_bytes, weight_bytes
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.model.shapes.config_fields import read_fields
from ferryman.model.weights.gguf_checkpoint import open_gguf
from ferryman.model.weights.named_weights import FLOATS


@pytest.fixture(params=VARIANTS)
def folder_and_file(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    architecture, config = VARIANTS[request.param]
    folder = save_random(tmp_path / "folder", config, seed=1)
    return folder, write_variant(folder, tmp_path / "tiny.gguf", architecture)


def test_logits_and_config_are_those_of_the_folder(folder_and_file: tuple[Path, Path]) -> None:
    folder, file = folder_and_file
    expected: Any = load_config(folder)
    actual: Any = load_config(file)
    trunk = actual.trunk
    assert trunk.eos_token_ids == (2,)
    assert trunk == replace(expected.trunk, eos_token_ids=(2,))
    named = read_fields(file / "config.json").words("architectures")
    assert set(named) <= set(ARCHITECTURES[read_model(file).metadata.architecture].folders)
    exact = logits(folder, "float64")
    assert exact.std() > 0.01
    # Logarithms are rounded to float32 once.
    difference = (logits(file, "float64") - exact).abs().max()
    assert difference <= 1e-6 * exact.abs().max(), difference


@with_panels
def test_weights_in_blocks_stay_in_them(
    folder_and_file: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, file = folder_and_file
    metadata, tensors = variant_parts(folder, read_model(file).metadata.architecture)
    write(file, metadata, [in_blocks(tensor) for tensor in tensors])
    options = LoadOptions("float32", page_size=16)
    held = held_bytes(load_model(file, options), is_on_cpu=True)
    assert weight_bytes(file, open_gguf(file).tensors, options) == held
    kept = logits(file, "float32")
    monkeypatch.setattr(LoadOptions, "format_of", lambda self, folder: FLOATS)
    assert held < 0.8 * held_bytes(load_model(file, options), is_on_cpu=True)
    difference = (kept - logits(file, "float32")).abs().max()
    assert difference <= 1e-4 * kept.abs().max(), difference


def test_layers_with_indexers_are_told_by_their_tensors(tmp_path: Path) -> None:
    """So they are in files of GLM-5.2 that lack the key."""
    architecture, config = VARIANTS["glm-dsa"]
    folder = save_random(tmp_path / "folder", config, seed=1)
    metadata, tensors = variant_parts(folder, architecture)
    del metadata["glm-dsa.attention.indexer.types"]
    file: Any = load_config(write(tmp_path / "tiny.gguf", metadata, tensors))
    assert file.has_indexer == (True, False, True, False)


def test_llama_4_without_chunks_is_refused_by_its_key(tmp_path: Path) -> None:
    architecture, config = VARIANTS["llama4"]
    folder = save_random(tmp_path / "folder", config, seed=1)
    metadata, tensors = variant_parts(folder, architecture)
    keys = {**metadata, "llama4.attention.sliding_window": 0}
    file = write(tmp_path / "tiny.gguf", keys, tensors)
    with pytest.raises(ConfigError, match=r"sliding_window' must be left out: layers have chunks"):
        load_config(file)
