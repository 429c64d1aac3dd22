"""The native family equals its formulas, with state of any kinds side by side."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tests.model.differences import difference
from tests.model.paged_run import PagedRun
from tests.model.ragged import ragged_logits, random_prompt
from tests.native import ALL_KINDS, native_config, reference_logits, save_native

from ferryman.cache.manifest import Kind
from ferryman.errors import ConfigError
from ferryman.model.config import load_config
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model

TOLERANCES = {"float32": 1e-4, "float64": 1e-12}
ATTENTION = ("full_attention", "sliding_attention")
RECURRENT = ("mamba", "linear_attention")


@pytest.mark.parametrize("seed", range(8))
def test_logits_equal_the_formulas_in_any_chunking(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    layers = ALL_KINDS if seed == 0 else tuple(_random_layers(rng))
    window = rng.choice([1, 2, rng.randint(3, 70)])
    folder = save_native(tmp_path, native_config(layers, sliding_window=window), seed)
    prompts = [random_prompt(rng, rng.randint(*span), 131) for span in ((1, 30), (31, 70))]
    expected = [reference_logits(folder, prompt) for prompt in prompts]
    page_size = rng.choice((4, 8, 16, 32, 64))
    for dtype, tolerance in TOLERANCES.items():
        run = PagedRun(load_model(folder, LoadOptions(dtype, page_size=page_size)), seed)
        for found, right in zip(ragged_logits(run, prompts, rng), expected, strict=True):
            assert difference(found, right) < tolerance, (dtype, page_size, layers)


def _random_layers(rng: random.Random) -> list[str]:
    """Each layer has one mixer, or one of each sort."""
    layers = []
    for _ in range(rng.randint(2, 4)):
        words = [rng.choice(ATTENTION), rng.choice(RECURRENT)]
        layers.append("+".join(rng.sample(words, rng.randint(1, 2))))
    return layers


def test_all_kinds_lie_in_one_manifest(tmp_path: Path) -> None:
    folder = save_native(tmp_path, native_config())
    manifest = load_model(folder, LoadOptions("float64", page_size=16)).manifest
    assert manifest.kinds == (Kind.FULL, Kind.WINDOW, Kind.RECURRENT)
    assert manifest.window_len == 21
    assert manifest.layout(Kind.FULL).layers == (0, 4)
    assert manifest.layout(Kind.WINDOW).layers == (2, 3)
    assert manifest.layout(Kind.RECURRENT).layers == (1, 3, 4, 5)


@pytest.mark.parametrize(
    "layer_types",
    [
        ["full_attention", "lstm"],
        ["full_attention+sliding_attention"],
        ["mamba+linear_attention"],
        ["mamba+mamba"],
        [],
    ],
    ids=["unknown word", "two attentions", "two recurrences", "twice the same", "no layers"],
)
def test_a_mix_that_cannot_be_is_refused_by_name(layer_types: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(native_config(layer_types)))
    with pytest.raises(ConfigError, match=r"layer_types|num_hidden_layers"):
        load_config(tmp_path)
