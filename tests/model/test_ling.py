"""Ling 3 by the names of its published folders; Ling 2.5, whose "model_type" is the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.model.comparison import random_config

from ferryman.errors import ConfigError
from ferryman.model.config import family_of, load_config

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


def test_ling_2_5_is_refused_by_its_name_though_its_model_type_is_that_of_ling_3(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"Ring 2\.5: lightning attention whose q and k have"):
        load_config(folder_of(tmp_path, LING_2_5))
