"""Random tiny configs of every family: logits equal transformers', however the prompt arrives.

Prompts are cut into chunks at random places of the page grid and decoded step by step, in ragged
batches, in pages of 4 to 64 tokens; pages behind a window are gone, poisoned and taken by others.
FERRYMAN_TEST_CONFIGS raises the number of configs of each family.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import random
from pathlib import Path

import pytest
import torch
from tests.model import families
from tests.model.differences import difference
from tests.model.families.shapes import VOCAB_SIZE
from tests.model.paged_run import PagedRun
from tests.model.ragged import ragged_logits, random_prompt
from tests.oracle import load_oracle
from tests.tiny_models import save_random
from transformers import PretrainedConfig

from ferryman.model.registry import load_model

FAMILIES = sorted(
    name for _, name, _ in pkgutil.iter_modules(families.__path__) if not name.endswith("shapes")
)
NUM_CONFIGS = int(os.environ.get("FERRYMAN_TEST_CONFIGS", "20"))
PAGE_SIZES = (4, 8, 16, 32, 64)
TOLERANCES = {"float32": 1e-4, "float64": 1e-9}


def random_config(family: str, seed: int) -> PretrainedConfig:
    module = importlib.import_module(f"tests.model.families.{family}")
    config: PretrainedConfig = module.random_config(random.Random(f"{family} {seed}"))
    return config


@pytest.mark.parametrize("seed", range(NUM_CONFIGS))
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_in_any_chunking(family: str, seed: int, tmp_path: Path) -> None:
    rng = random.Random(f"prompts of {family} {seed}")
    folder = save_random(tmp_path, random_config(family, seed), seed)
    prompts = [random_prompt(rng, rng.randint(*span), VOCAB_SIZE) for span in ((1, 40), (41, 120))]
    oracle = load_oracle(folder, torch.float64)
    expected = [oracle.logits(prompt) for prompt in prompts]
    page_size = rng.choice(PAGE_SIZES)
    for dtype, tolerance in TOLERANCES.items():
        run = PagedRun(load_model(folder, dtype, page_size=page_size), seed)
        for found, right in zip(ragged_logits(run, prompts, rng), expected, strict=True):
            assert difference(found, right) < tolerance, (dtype, page_size)
