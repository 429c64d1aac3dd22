from __future__ import annotations

import random
from typing import Any

from tests.model.families.shapes import trunk
from transformers import FalconMambaConfig, Mamba2Config, MambaConfig, PretrainedConfig


def mamba(rng: random.Random) -> PretrainedConfig:
    return MambaConfig(**_mamba1(rng))


def mamba2(rng: random.Random) -> PretrainedConfig:
    heads, head_dim = rng.choice([(3, 16), (5, 8), (6, 8), (8, 16)])
    return Mamba2Config(
        **_trunk(rng),
        hidden_size=heads * head_dim // 2,
        num_heads=heads,
        head_dim=head_dim,
        n_groups=rng.choice([1, heads]),
        state_size=rng.choice([4, 12, 16]),
        conv_kernel=rng.choice([2, 3, 4]),
        chunk_size=16,
        use_bias=rng.random() < 0.5,
        use_conv_bias=rng.random() < 0.5,
        residual_in_fp32=rng.random() < 0.5,
        time_step_limit=rng.choice([(0.0, float("inf")), (0.05, 0.4)]),
    )


def falcon_mamba(rng: random.Random) -> PretrainedConfig:
    # A norm over one or two numbers is nearly their sign: it magnifies roundings without bound.
    sizes = {**_mamba1(rng), "time_step_rank": rng.choice([4, 5, 7])}
    return FalconMambaConfig(**sizes, mixer_rms_eps=rng.choice([1e-6, 1e-3]))


def _mamba1(rng: random.Random) -> dict[str, Any]:
    """Odd numbers of channels, states and ranks of dt."""
    return {
        **_trunk(rng),
        "hidden_size": rng.choice([24, 35, 48]),
        "state_size": rng.choice([3, 8, 16]),
        "expand": rng.choice([1, 2]),
        "conv_kernel": rng.choice([2, 3, 4]),
        "time_step_rank": rng.choice(["auto", 1, 5]),
        "use_bias": rng.random() < 0.5,
        "use_conv_bias": rng.random() < 0.5,
        "residual_in_fp32": rng.random() < 0.5,
    }


def _trunk(rng: random.Random) -> dict[str, Any]:
    """The fields that every config has, by the names of models without attention."""
    fields = trunk(rng, rng.randint(1, 4))
    fields["layer_norm_epsilon"] = fields.pop("rms_norm_eps")
    del fields["max_position_embeddings"]
    return fields
