from __future__ import annotations

import random

from tests.model.families.shapes import grouped_heads, sizes, trunk
from transformers import FalconH1Config, PretrainedConfig


def falcon_h1(rng: random.Random) -> PretrainedConfig:
    heads, head_dim = rng.choice([(3, 16), (5, 8), (6, 8)])
    return FalconH1Config(
        **trunk(rng, rng.randint(1, 3)),
        **grouped_heads(rng),
        **sizes(rng),
        attention_bias=rng.random() < 0.5,
        mlp_bias=rng.random() < 0.5,
        projectors_bias=rng.random() < 0.5,
        mamba_d_ssm=heads * head_dim,
        mamba_n_heads=heads,
        mamba_d_head=head_dim,
        mamba_n_groups=rng.choice([1, heads]),
        mamba_d_state=rng.choice([4, 12, 16]),
        mamba_d_conv=rng.choice([2, 3, 4]),
        mamba_chunk_size=16,
        mamba_conv_bias=rng.random() < 0.5,
        mamba_proj_bias=rng.random() < 0.5,
        mamba_rms_norm=rng.random() < 0.7,
        mamba_norm_before_gate=rng.random() < 0.5,
        rope_parameters={"rope_type": "default", "rope_theta": rng.choice([1e2, 1e4])},
        embedding_multiplier=_multiplier(rng),
        lm_head_multiplier=_multiplier(rng),
        key_multiplier=_multiplier(rng),
        attention_in_multiplier=_multiplier(rng),
        attention_out_multiplier=_multiplier(rng),
        ssm_in_multiplier=_multiplier(rng),
        ssm_out_multiplier=_multiplier(rng),
        ssm_multipliers=[_multiplier(rng) for _ in range(5)],
        mlp_multipliers=[_multiplier(rng) for _ in range(2)],
    )


def _multiplier(rng: random.Random) -> float:
    """A fraction that float32 can hold exactly: transformers keeps some multipliers in float32."""
    return rng.choice([0.375, 0.75, 1.25, 1.5])
