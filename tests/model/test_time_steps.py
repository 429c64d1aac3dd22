"""Time steps are bounded by `time_step_limit`, where transformers reads `time_step_min` instead.

The oracle's own bounds are replaced by those of the config.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
from tests.model.differences import difference
from tests.model.families.nemotron_h import nemotron_h
from tests.model.families.shapes import VOCAB_SIZE
from tests.model.paged_run import PagedRun, Part
from tests.model.ragged import random_prompt
from tests.oracle import load_oracle
from tests.tiny_models import save_random

from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model

LIMIT = (0.3, 0.6)


def test_nemotrons_time_steps_are_those_of_its_published_code(tmp_path: Path) -> None:
    rng = random.Random(5)
    config = nemotron_h(rng)
    config.layers_block_type = ["linear_attention", "full_attention"]
    config.time_step_min, config.time_step_limit = 0.001, LIMIT
    folder = save_random(tmp_path, config, 5)
    oracle, prompt = load_oracle(folder, torch.float64), random_prompt(rng, 70, VOCAB_SIZE)
    run = PagedRun(load_model(folder, LoadOptions("float64", page_size=16)))
    (found,) = run.prefill([Part(run.start(), prompt)])
    assert difference(found, oracle.logits(prompt)) > 1e-6, "the bounds were meant to matter"
    bounded = [part for part in oracle.model.modules() if hasattr(part, "time_step_limit")]
    for mixer in bounded:
        mixer.time_step_limit = LIMIT
    assert len(bounded) == 1
    assert difference(found, oracle.logits(prompt)) < 1e-12
