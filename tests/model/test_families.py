"""Random tiny configs of every family: logits equal transformers' for any division of the prompt.

Prompts are cut into chunks at random places of the page grid and decoded step by step, in ragged
batches, in pages of 4 to 64 tokens. Pages behind a window are freed, poisoned and reused.
FERRYMAN_TEST_CONFIGS is the number of configs of each family: 20 stand behind the docs, CI runs 12,
of which the first 4 are not `slow`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.model.comparison import FAMILIES, TOLERANCES, compare

NUM_CONFIGS = int(os.environ.get("FERRYMAN_TEST_CONFIGS", "12"))
NUM_QUICK = 4
SEEDS = [
    pytest.param(seed, marks=[pytest.mark.slow] if seed >= NUM_QUICK else [])
    for seed in range(NUM_CONFIGS)
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_in_any_chunking(family: str, seed: int, tmp_path: Path) -> None:
    differences = compare(family, seed, tmp_path).differences
    assert all(differences[dtype] < tolerance for dtype, tolerance in TOLERANCES.items())
