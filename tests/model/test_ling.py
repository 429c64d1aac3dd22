"""Ling 3 by the names of its published folders; Ling 2.5, whose "model_type" is the same, and the
slopes of its heads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.model.comparison import random_config
from tests.tiny_models import save_random

from ferryman.model.config import family_of, load_config
from ferryman.model.layers.lightning_attention import LightningScan
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model

LING_3, LING_2_5 = "BailingMoeV3ForCausalLM", "BailingMoeV2_5ForCausalLM"
"""The architectures in published folders; transformers has another name for the first."""


def folder_of(folder: Path, architecture: str, **changed: Any) -> Path:
    """A folder with a random config of Ling 3 under the name `architecture`."""
    raw = random_config("bailing_hybrid", 3).to_dict()
    config = {**raw, "architectures": [architecture], **changed}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_ling_3_is_read_by_the_name_in_its_folders(tmp_path: Path) -> None:
    assert family_of(folder_of(tmp_path, LING_3)).name == "bailing_hybrid"


def test_a_part_that_turns_is_one_of_a_whole_head_not_of_its_rotating_channels(
    tmp_path: Path,
) -> None:
    """Ling 3's folders have a partial_rotary_factor of a half, of heads of 128: all 64 turn."""
    read = load_config(folder_of(tmp_path, LING_3))
    rope = {"rope_type": "default", "rope_theta": 6e6, "partial_rotary_factor": 0.5}
    plain = {"rope_type": "default", "rope_theta": 6e6}
    whole = load_config(folder_of(tmp_path, LING_3, rope_parameters=plain))
    partial = folder_of(tmp_path, LING_3, rope_parameters=rope, partial_rotary_factor=0.5)
    assert load_config(partial) == whole
    assert read.trunk == whole.trunk


def test_ling_2_5_is_told_by_its_name_though_its_model_type_is_that_of_ling_3(
    tmp_path: Path,
) -> None:
    raw = {**random_config("ling_25", 0).to_dict(), "model_type": "bailing_hybrid"}
    config = {**raw, "architectures": [LING_2_5]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert family_of(tmp_path).name == "ling_25"
    load_config(tmp_path)


def slopes_of(heads: int, num_layers: int, folder: Path) -> list[list[float]]:
    """Those of each layer of lightning attention in a model whose fourth layers are latent."""
    config = random_config("ling_25", 0)
    config.num_attention_heads = config.num_key_value_heads = heads
    config.num_hidden_layers, config.layer_group_size, config.group_norm_size = num_layers, 4, 1
    config.first_k_dense_replace = num_layers
    save_random(folder, config, 0)
    model = load_model(folder, LoadOptions("float64", page_size=16))
    scans = {part.layer: part for part in parts_of(model) if isinstance(part, LightningScan)}
    return [(-scans[layer].rates).tolist() for layer in sorted(scans)]


def parts_of(value: object) -> Iterator[object]:
    """The dataclasses in `value`, wherever they lie."""
    if isinstance(value, tuple):
        for part in value:
            yield from parts_of(part)
    elif is_dataclass(value) and not isinstance(value, type):
        yield value
        for each in fields(value):
            yield from parts_of(getattr(value, each.name))


def test_slopes_fall_by_head_and_by_depth_from_layer_zero(tmp_path: Path) -> None:
    """Of 6 heads the first four have those of 4, the others every second one of 8."""
    of_heads = [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]
    by_layer = slopes_of(6, 8, tmp_path)
    depths = [1 - layer / 7 + 1e-5 for layer in (0, 1, 2, 4, 5, 6)]
    for depth, slopes in zip(depths, by_layer, strict=True):
        assert slopes == pytest.approx([slope * depth for slope in of_heads], rel=1e-12)


def test_slopes_of_a_power_of_two_are_powers_of_one_number(tmp_path: Path) -> None:
    (first, *_) = slopes_of(8, 4, tmp_path)
    assert first == pytest.approx([2**-head * (1 + 1e-5) for head in range(1, 9)], rel=1e-12)
