"""The launches of published models whose kernels take other numbers of experts than the config."""

from __future__ import annotations

import json
from pathlib import Path

from tools.kernel_launches import launch_choice, launch_experts, launch_weighted_sum
from tools.published_launches import Launch, launches_of

from ferryman.model.config import load_config

PUBLISHED = Path(__file__).parents[1] / "model" / "published"


def launches(model: str, folder: Path) -> set[Launch]:
    raw = json.loads((PUBLISHED / f"{model}.json").read_text())["config"]
    (folder / "config.json").write_text(json.dumps(raw))
    return set(launches_of(load_config(folder)))


def test_inklings_shared_experts_are_behind_the_others(tmp_path: Path) -> None:
    made = launches("thinkingmachines--Inkling", tmp_path)
    assert {launch[1] for launch in made if launch[0] is launch_experts} == {258}
    assert {launch[1] for launch in made if launch[0] is launch_weighted_sum} == {8}
    assert {launch[1:] for launch in made if launch[0] is launch_choice} == {(256, 6)}


def test_zayas_router_chooses_among_its_experts_and_none(tmp_path: Path) -> None:
    made = launches("Zyphra--ZAYA1-8B", tmp_path)
    assert {launch[1:] for launch in made if launch[0] is launch_choice} == {(17, 1)}
    assert {launch[1] for launch in made if launch[0] is launch_experts} == {16}
