from __future__ import annotations

import random

from tests.model.families.shapes import trunk
from transformers import Mamba2Config, PretrainedConfig


def random_config(rng: random.Random) -> PretrainedConfig:
    heads, head_dim = rng.choice([(3, 16), (5, 8), (6, 8), (8, 16)])
    sizes = trunk(rng, rng.randint(1, 4))
    sizes["layer_norm_epsilon"] = sizes.pop("rms_norm_eps")
    sizes.pop("max_position_embeddings")
    return Mamba2Config(
        **sizes,
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
