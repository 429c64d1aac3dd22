"""Folders of one architecture with texts of several families: the text's "model_type" decides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.model.comparison import random_config

from ferryman.model.config import family_of, load_config


@pytest.mark.parametrize(
    ("text", "family"),
    [("mistral4", "mistral4"), ("mistral", "mistral"), ("ministral3", "mistral")],
)
def test_a_mistral_with_images_is_of_the_family_of_its_text(
    text: str, family: str, tmp_path: Path
) -> None:
    nested = {**random_config(family, 2).to_dict(), "model_type": text}
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": nested}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert family_of(tmp_path).name == family
    assert load_config(tmp_path).trunk.hidden_dim == nested["hidden_size"]
