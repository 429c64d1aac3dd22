from __future__ import annotations

import random
from typing import Any

from tests.model.families.shapes import MAX_POSITIONS, grouped_heads, rope, trunk, window_len
from transformers import Phi3Config, PhiConfig, PhimoeConfig, PretrainedConfig


def phi(rng: random.Random) -> PretrainedConfig:
    heads, fields = grouped_heads(rng), trunk(rng, rng.randint(1, 4))
    del heads["head_dim"]
    fields["layer_norm_eps"] = fields.pop("rms_norm_eps")
    return PhiConfig(
        **fields,
        **heads,
        hidden_size=heads["num_attention_heads"] * rng.choice([8, 16]),
        intermediate_size=rng.choice([32, 56]),
        rope_parameters={**rope(rng), "partial_rotary_factor": rng.choice([0.5, 1.0])},
    )


def phi3(rng: random.Random) -> PretrainedConfig:
    heads, head_dim = grouped_heads(rng), rng.choice([8, 16])
    del heads["head_dim"]
    share = rng.choice([0.5, 0.75, 1.0])
    return Phi3Config(
        **trunk(rng, rng.randint(1, 4)),
        **heads,
        hidden_size=heads["num_attention_heads"] * head_dim,
        intermediate_size=rng.choice([32, 56]),
        sliding_window=rng.choice([None, window_len(rng)]),
        **_longrope(rng, int(head_dim * share) // 2, share),
    )


def _longrope(rng: random.Random, num_waves: int, share: float) -> dict[str, Any]:
    """Waves for prompts within the trained length, or beyond it.

    transformers chooses by the length of a prompt, this model by that of its context. So either all
    prompts are within the trained length, or all beyond it but for one token, which turns by zero.
    """
    factors = [[rng.uniform(1.0, 8.0) for _ in range(num_waves)] for _ in range(2)]
    rope = {
        "rope_type": rng.choice(["default", "longrope", "longrope"]),
        "rope_theta": rng.choice([1e2, 1e4]),
        "partial_rotary_factor": share,
    }
    if rope["rope_type"] == "default":
        return {"rope_parameters": rope}
    is_long = rng.random() < 0.5
    trained_len = 1 if is_long else MAX_POSITIONS
    rope |= {"short_factor": factors[0], "long_factor": factors[1]}
    rope |= {"original_max_position_embeddings": trained_len}
    rope |= {"attention_factor": rng.choice([0.8, 1.2])} if is_long else {}
    return {"rope_parameters": rope, "original_max_position_embeddings": trained_len}


def phimoe(rng: random.Random) -> PretrainedConfig:
    heads, head_dim = grouped_heads(rng), rng.choice([4, 8])
    del heads["head_dim"]
    return PhimoeConfig(
        **trunk(rng, rng.randint(1, 4)),
        **heads,
        hidden_size=heads["num_attention_heads"] * head_dim,
        intermediate_size=rng.choice([16, 24]),
        num_local_experts=rng.choice([2, 5]),
        num_experts_per_tok=2,
        router_jitter_noise=rng.choice([0.01, 0.1]),
        attention_bias=rng.random() < 0.7,
        lm_head_bias=rng.random() < 0.7,
        sliding_window=rng.choice([None, window_len(rng)]),
        rope_parameters=_waves(rng, head_dim // 2),
    )


def _waves(rng: random.Random, num_waves: int) -> dict[str, Any]:
    """All prompts are within the trained length: beyond it transformers keeps the short factors,
    unlike the code that came with the model."""
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": rng.choice([1e2, 1e4])}
    if rng.random() < 0.5:
        return found
    factors = [[rng.uniform(1.0, 8.0) for _ in range(num_waves)] for _ in range(2)]
    found |= {"rope_type": "longrope", "short_factor": factors[0], "long_factor": factors[1]}
    found |= {"short_mscale": rng.uniform(0.8, 1.3), "long_mscale": 1.2}
    return {**found, "original_max_position_embeddings": MAX_POSITIONS}
