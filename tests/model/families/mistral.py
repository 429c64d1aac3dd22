from __future__ import annotations

import random
from typing import Any

from tests.model.families.shapes import grouped_heads, pattern, rope, sizes, trunk, window_len
from transformers import (
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
)


def mistral(rng: random.Random) -> PretrainedConfig:
    num_layers = rng.randint(1, 4)
    fields = {
        **trunk(rng, num_layers),
        **grouped_heads(rng),
        **sizes(rng),
        "rope_parameters": rope(rng),
        "sliding_window": rng.choice([None, window_len(rng)]),
    }
    kind = rng.choice([MistralConfig, MinistralConfig, Ministral3Config])
    if kind is MinistralConfig:  # always has windows: transformers asks for their length
        fields["sliding_window"] = window_len(rng)
        fields["layer_types"] = pattern(rng, num_layers, ["full_attention", "sliding_attention"])
    if kind is Ministral3Config:
        fields["rope_parameters"] = _growing(rng)
    return kind(**fields)


def _growing(rng: random.Random) -> dict[str, Any]:
    """YaRN as in Ministral 3: queries grow every 16 or 50 positions."""
    return {
        "rope_type": "yarn",
        "rope_theta": rng.choice([1e2, 1e4]),
        "factor": rng.choice([4.0, 16.0]),
        "original_max_position_embeddings": rng.choice([16, 50]),
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": rng.choice([0.1, 0.7]),
    }


def mixtral(rng: random.Random) -> PretrainedConfig:
    num_experts = rng.choice([2, 5])
    return MixtralConfig(
        **trunk(rng, rng.randint(1, 4)),
        **grouped_heads(rng),
        hidden_size=rng.choice([24, 40]),
        intermediate_size=rng.choice([16, 24]),
        num_local_experts=num_experts,
        num_experts_per_tok=rng.randint(1, num_experts),
        sliding_window=rng.choice([None, None, window_len(rng)]),
        rope_parameters=rope(rng),
    )
