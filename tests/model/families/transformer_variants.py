from __future__ import annotations

import random

from tests.model.families.shapes import grouped_heads, rope, trunk, window_len
from transformers import (
    ApertusConfig,
    PretrainedConfig,
    StableLmConfig,
    Starcoder2Config,
)


def stablelm(rng: random.Random) -> PretrainedConfig:
    """Waves are as they were trained: transformers gives other types a whole head."""
    heads, fields = grouped_heads(rng), trunk(rng, rng.randint(1, 4))
    del heads["head_dim"]
    fields["layer_norm_eps"] = fields.pop("rms_norm_eps")
    waves = {"rope_type": "default", "rope_theta": rng.choice([1e2, 1e4, 150_000.0])}
    share = rng.choice([0.25, 0.5, 1.0])
    return StableLmConfig(
        **fields,
        **heads,
        hidden_size=heads["num_attention_heads"] * rng.choice([8, 16]),
        intermediate_size=rng.choice([32, 56]),
        use_qkv_bias=rng.random() < 0.5,
        qk_layernorm=rng.random() < 0.5,
        use_parallel_residual=rng.random() < 0.5,
        rope_parameters={**waves, "partial_rotary_factor": share},
    )


def starcoder2(rng: random.Random) -> PretrainedConfig:
    heads, fields = grouped_heads(rng), trunk(rng, rng.randint(1, 4))
    head_dim, fields["norm_epsilon"] = heads.pop("head_dim"), fields.pop("rms_norm_eps")
    return Starcoder2Config(
        **fields,
        **heads,
        hidden_size=heads["num_attention_heads"] * head_dim,
        intermediate_size=rng.choice([32, 56]),
        use_bias=rng.random() < 0.7,
        sliding_window=rng.choice([None, window_len(rng)]),
        rope_parameters=rope(rng),
    )


def apertus(rng: random.Random) -> PretrainedConfig:
    heads = grouped_heads(rng)
    return ApertusConfig(
        **trunk(rng, rng.randint(1, 4)),
        **heads,
        hidden_size=heads["num_attention_heads"] * rng.choice([4, 6]),
        intermediate_size=rng.choice([32, 56]),
        attention_bias=rng.random() < 0.5,
        rope_parameters=rope(rng),
    )
