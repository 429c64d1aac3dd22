from __future__ import annotations

import random

from tests.model.families.delta_shapes import experts, hybrid
from transformers import PretrainedConfig, Qwen3_5MoeTextConfig, Qwen3_5TextConfig


def random_config(rng: random.Random) -> PretrainedConfig:
    fields = hybrid(rng)
    fields["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [1, 1, 0]}
    if rng.random() < 0.5:
        return Qwen3_5MoeTextConfig(**fields, **experts(rng))
    return Qwen3_5TextConfig(**fields, intermediate_size=rng.choice([32, 56]))
