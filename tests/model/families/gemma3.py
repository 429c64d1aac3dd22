from __future__ import annotations

import random
from typing import Any

from tests.model.families.shapes import grouped_heads, pattern, rope, trunk, window_len
from transformers import Gemma3TextConfig, PretrainedConfig


def random_config(rng: random.Random) -> PretrainedConfig:
    num_layers, heads = rng.randint(1, 7), grouped_heads(rng)
    words = ["sliding_attention", "full_attention"]
    return Gemma3TextConfig(
        **trunk(rng, num_layers),
        **heads,
        hidden_size=heads["num_attention_heads"] * rng.choice([4, 6]),
        intermediate_size=rng.choice([32, 56]),
        attention_bias=rng.random() < 0.3,
        query_pre_attn_scalar=rng.choice([4, 17, 256]),
        final_logit_softcapping=rng.choice([None, 2.0, 30.0]),
        sliding_window=window_len(rng),
        layer_types=rng.choice([None, pattern(rng, num_layers, words)]),
        rope_parameters={word: _waves(rng) for word in words},
    )


def _waves(rng: random.Random) -> dict[str, Any]:
    """Without YaRN's `truncate`, which transformers looks for in the wrong place."""
    parameters = rope(rng)
    parameters.pop("truncate", None)
    return parameters
