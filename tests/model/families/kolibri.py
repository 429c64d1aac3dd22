from __future__ import annotations

import random

from tests.model.families.shapes import (
    LAYER_TYPES,
    experts,
    grouped_heads,
    pattern,
    rope,
    trunk,
    window_len,
)
from transformers import Kolibri1Config, PretrainedConfig


def kolibri1(rng: random.Random) -> PretrainedConfig:
    """Layers without a window have no positions."""
    num_layers = rng.randint(1, 5)
    return Kolibri1Config(
        **trunk(rng, num_layers),
        **grouped_heads(rng),
        **experts(rng),
        layer_types=pattern(rng, num_layers, LAYER_TYPES),
        sliding_window=window_len(rng),
        hidden_size=rng.choice([24, 40]),
        shared_expert_intermediate_size=rng.choice([8, 20]),
        norm_topk_prob=rng.random() < 0.5,
        rope_parameters=rope(rng),
    )
