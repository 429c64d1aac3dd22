"""Random tiny configs of every family: logits equal transformers' for any division of the prompt.

Prompts are cut into chunks at random places of the page grid and decoded step by step, in ragged
batches, in pages of 4 to 64 tokens. Pages behind a window are freed, poisoned and reused.
FERRYMAN_TEST_CONFIGS is the number of configs of each family: 20 stand behind the docs, CI runs 12.
Not `slow` are the first 4 of a family of each kind, and the first of every other.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.model.comparison import (
    BY_NAME,
    FAMILIES,
    OF_EACH_KIND,
    TOLERANCES,
    architecture_of,
    compare,
    random_config,
)
from tests.tiny_models import save_random

from ferryman.model.config import load_config
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model

NUM_CONFIGS = int(os.environ.get("FERRYMAN_TEST_CONFIGS", "12"))
NUM_QUICK, NUM_QUICK_OF_OTHERS = 4, 1


def _is_quick(family: str, seed: int) -> bool:
    return seed < (NUM_QUICK if family in OF_EACH_KIND else NUM_QUICK_OF_OTHERS)


CONFIGS = [
    pytest.param(family, seed, marks=[] if _is_quick(family, seed) else [pytest.mark.slow])
    for family in FAMILIES
    for seed in range(NUM_CONFIGS)
]


@pytest.mark.parametrize(("family", "seed"), CONFIGS)
def test_logits_equal_transformers_in_any_chunking(family: str, seed: int, tmp_path: Path) -> None:
    comparison = compare(family, seed, tmp_path)
    differences = comparison.differences
    assert all(differences[dtype] < tolerance for dtype, tolerance in TOLERANCES.items())
    assert set(comparison.kinds) <= set(BY_NAME[family].kinds)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_that_a_family_names_is_kept_by_a_config(family: str, tmp_path: Path) -> None:
    kept = set[str]()
    for seed in range(NUM_CONFIGS):
        config = random_config(family, seed)
        config.architectures = [architecture_of(config)]
        config.save_pretrained(tmp_path)
        kept |= {shape.kind for layer in load_config(tmp_path).states for shape in layer}
    assert kept == set(BY_NAME[family].kinds)


@pytest.mark.slow
def test_every_class_of_layers_is_in_a_family_that_is_quick(tmp_path: Path) -> None:
    classes = {family: _layer_classes(family, tmp_path / family) for family in FAMILIES}
    quick = set[str]().union(*(classes[family] for family in FAMILIES if family in OF_EACH_KIND))
    others = {family: found - quick for family, found in classes.items() if found - quick}
    assert not others


def _layer_classes(family: str, folder: Path) -> set[str]:
    """Of the layers of some models: what mixes, what feeds, and the layers that hold them."""
    found = set[str]()
    for seed in range(NUM_QUICK):
        save_random(folder / str(seed), random_config(family, seed), seed)
        model = load_model(folder / str(seed), LoadOptions("float32", page_size=16))
        for layer in model.layers:
            parts = (getattr(layer, name, None) for name in ("mixer", "feed_forward"))
            found |= {type(part).__name__ for part in (layer, *parts) if part is not None}
    return found
