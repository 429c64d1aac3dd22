from __future__ import annotations

import random

from tests.model.families.shapes import (
    LAYER_TYPES,
    grouped_heads,
    pattern,
    rope,
    sizes,
    trunk,
    window_len,
)
from transformers import (
    ApertusConfig,
    Cohere2Config,
    Exaone4Config,
    PretrainedConfig,
    StableLmConfig,
    Starcoder2Config,
)


def exaone4(rng: random.Random) -> PretrainedConfig:
    num_layers, has_windows = rng.randint(1, 5), rng.random() < 0.7
    types = (
        pattern(rng, num_layers, LAYER_TYPES) if has_windows else ["full_attention"] * num_layers
    )
    return Exaone4Config(
        **trunk(rng, num_layers),
        **grouped_heads(rng),
        **sizes(rng),
        sliding_window=window_len(rng) if has_windows else None,
        sliding_window_pattern=rng.choice([2, 4]),
        layer_types=rng.choice([None, types]) if has_windows else types,
        rope_parameters=rope(rng),
    )


def cohere2(rng: random.Random) -> PretrainedConfig:
    num_layers, heads = rng.randint(1, 5), grouped_heads(rng)
    head_dim = heads.pop("head_dim")
    fields = trunk(rng, num_layers)
    fields["layer_norm_eps"] = fields.pop("rms_norm_eps")
    return Cohere2Config(
        **fields,
        **heads,
        hidden_size=heads["num_attention_heads"] * head_dim * 2,
        intermediate_size=rng.choice([32, 56]),
        attention_bias=rng.random() < 0.5,
        logit_scale=rng.uniform(0.05, 1.0),
        sliding_window=window_len(rng),
        layer_types=rng.choice([None, pattern(rng, num_layers, LAYER_TYPES)]),
        rope_parameters=rope(rng),
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
