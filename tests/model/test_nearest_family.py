"""A published config under an unknown name is nearest to its own family, by what is in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.model_tables import ReadConfig, read_configs

from ferryman.model.families import FAMILIES
from ferryman.model.nearest_family import NearestFamily, nearest_family, published_families
from ferryman.model.shapes.config_fields import ConfigFields

UNKNOWN = "XyzForCausalLM"
READ = read_configs()


def nearest_without(read: ReadConfig, *left_out: str) -> NearestFamily | None:
    """The nearest family of a published config whose architecture nobody knows."""
    fields = {**read.published.config, "architectures": [UNKNOWN]}
    parts = [fields, fields.get("text_config", {})]
    bare, text = ({key: part[key] for key in part if key not in left_out} for part in parts)
    nested = {"text_config": text} if text else {}
    return nearest_family(ConfigFields(Path("config.json"), {**bare, **nested}), UNKNOWN)


@pytest.mark.parametrize("read", READ, ids=[read.published.model for read in READ])
def test_a_model_type_decides(read: ReadConfig) -> None:
    nearest = nearest_without(read)
    assert nearest is not None
    types = {part.get("model_type") for part in (read.published.config, nearest.text.raw)}
    assert nearest.published.types & types or types == {None}
    assert not nearest.missing or nearest.published.family != read.family


def test_fields_alone_find_the_families_that_no_other_looks_like() -> None:
    found = 0
    for read in READ:
        nearest = nearest_without(read, "model_type", "architectures")
        found += nearest is not None and nearest.published.family == read.family
    assert found >= 0.8 * len(READ)


def test_a_text_that_names_a_family_is_nearer_than_any_name() -> None:
    """Kimi K3's text is Kimi Linear's; by its name it would be Kimi K2.5."""
    text = {"architectures": ["KimiLinearForCausalLM"], "hidden_size": 64, "a_new_field": 2}
    fields = ConfigFields(Path("config.json"), {"text_config": text})
    nearest = nearest_family(fields, "Kimi_K25ForConditionalGenerations")
    assert nearest is not None
    assert nearest.published.family.name == "kimi_linear"
    assert nearest.unknown == ("a_new_field",)
    assert "kv_lora_rank" in nearest.missing


def test_fields_that_are_switched_off_say_nothing() -> None:
    raw = {"model_type": "llama", "new_gate": False, "new_rank": None, "new_mode": "fast"}
    nearest = nearest_family(ConfigFields(Path("config.json"), raw), UNKNOWN)
    assert nearest is not None
    assert nearest.unknown == ("new_mode",)


def test_every_family_has_a_published_model() -> None:
    names = {published.family.name for published in published_families()}
    assert names == {family.name for family in FAMILIES} - {"native"}
