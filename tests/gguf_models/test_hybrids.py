"""Hybrids and mixtures are the same models from their folders and from their GGUF files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.gguf_models.compared_file import (
    assert_blocks_stay,
    assert_logits_are_the_folders,
    in_blocks,
    logits_of,
    prompt_of,
    with_panels,
)
from tests.gguf_models.files import WrittenTensor, floats, write
from tests.gguf_models.hybrid_conversion import hybrid_parts, write_hybrid
from tests.gguf_models.hybrid_models import HYBRIDS
from tests.gguf_models.test_architectures import rewritten
from tests.tiny_models import save_random
from tests.tools.bench.tiny_shapes import save_tiny
from tools.bench.gguf.conversion import convert_folder
from torch import Tensor

from ferryman.errors import ConfigError
from ferryman.model.config import load_config
from ferryman.model.footprint import held_bytes
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.model.weights.gguf_checkpoint import open_gguf
from ferryman.model.weights.named_weights import FLOATS

Q8_0 = 8
"""ggml's number of the type."""


@pytest.fixture(params=HYBRIDS)
def folder_and_file(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    architecture, config = HYBRIDS[request.param]
    folder = save_random(tmp_path / "folder", config, seed=1)
    return folder, write_hybrid(folder, tmp_path / "tiny.gguf", architecture)


def logits(model: Path, dtype: str) -> Tensor:
    return logits_of(model, dtype, prompt_of(40), (30, 37))


def test_logits_and_config_are_those_of_the_folder(folder_and_file: tuple[Path, Path]) -> None:
    folder, file = folder_and_file
    expected: Any = load_config(folder)
    if not hasattr(expected, "multipliers"):
        actual: Any = load_config(file)
        assert actual == replace(expected, trunk=replace(expected.trunk, eos_token_ids=(2,)))
    # Norms from 1 on, logarithms and multiplied weights are rounded to float32 once.
    assert_logits_are_the_folders(folder, file, logits, tolerance=1e-5)


@with_panels
def test_weights_in_blocks_stay_in_them(
    folder_and_file: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, request: Any
) -> None:
    folder, file = folder_and_file
    architecture, _ = HYBRIDS[request.node.callspec.params["folder_and_file"]]
    assert_blocks_stay(file, hybrid_parts(folder, architecture), logits, 0.8, monkeypatch)


@with_panels
def test_experts_of_gpt_oss_stay_in_mxfp4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture, config = HYBRIDS["gpt-oss"]
    folder = save_random(tmp_path / "folder", config, seed=1)
    metadata, tensors = hybrid_parts(folder, architecture)
    coded = [mxfp4(t) if t.name.endswith("exps.weight") else t for t in tensors]
    file = write(tmp_path / "tiny.gguf", metadata, coded)
    options = LoadOptions("bfloat16", page_size=16)
    held, kept = held_bytes(load_model(file, options), is_on_cpu=True), logits(file, "bfloat16")
    monkeypatch.setattr(LoadOptions, "format_of", lambda self, folder: FLOATS)
    dense = held_bytes(load_model(file, options), is_on_cpu=True)
    num_weights = sum(int(np.prod(t.shape)) for t in tensors if t.name.endswith("exps.weight"))
    # 4 bits and two bytes for 32 of them in place of 16 bits, and four bytes for each row.
    assert dense - held > num_weights
    difference = (kept - logits(file, "bfloat16")).abs().max()
    assert difference <= 0.05 * kept.abs().max(), difference


def mxfp4(tensor: WrittenTensor) -> WrittenTensor:
    """Random codes with powers around 2^-8."""
    rng = np.random.default_rng(sum(tensor.name.encode()))
    blocks = rng.integers(0, 256, (int(np.prod(tensor.shape)) // 32, 17), dtype=np.uint8)
    blocks[:, 0] = rng.integers(119, 122, len(blocks))
    return replace(tensor, type_number=39, content=blocks.tobytes())


def test_layers_for_multi_token_prediction_are_left_out(tmp_path: Path) -> None:
    architecture, config = HYBRIDS["glm4moe"]
    folder = save_random(tmp_path / "folder", config, seed=1)
    keys = {"glm4moe.block_count": 5, "glm4moe.nextn_predict_layers": 1}
    metadata, tensors = hybrid_parts(folder, architecture, keys)
    drafting = [
        replace(tensor, name=tensor.name.replace("blk.3.", "blk.4."))
        for tensor in tensors
        if tensor.name.startswith("blk.3.")
    ]
    file = write(tmp_path / "tiny.gguf", metadata, [*tensors, *drafting])
    plain = write_hybrid(folder, tmp_path / "plain.gguf", architecture)
    assert load_config(file) == load_config(plain)
    assert open_gguf(file).tensors.keys() == open_gguf(plain).tensors.keys()
    write(file, {**metadata, "glm4moe.nextn_predict_layers": 6}, tensors)
    with pytest.raises(ConfigError, match=r"nextn_predict_layers' must be at most the 5 of"):
        load_config(file)


@with_panels
def test_experts_that_a_folder_has_as_one_tensor_are_a_stack_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Granite's `output_linear` has the experts of a layer, as in the file."""
    save_tiny(tmp_path / "folder", "granite-experts")
    convert_folder(tmp_path / "folder", "float32")
    metadata, tensors = rewritten(tmp_path / "folder" / "gguf")
    coded = [in_blocks(floats(*named)) for named in tensors.items()]
    stacks = [t for t in coded if t.name.endswith("down_exps.weight") and t.type_number == Q8_0]
    assert stacks
    file = write(tmp_path / "tiny.gguf", metadata, coded)
    kept = logits(file, "float32")
    monkeypatch.setattr(LoadOptions, "format_of", lambda self, folder: FLOATS)
    difference = (kept - logits(file, "float32")).abs().max()
    assert difference <= 1e-4 * kept.abs().max(), difference
