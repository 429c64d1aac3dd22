from __future__ import annotations

import random

from tests.model.families.shapes import trunk
from transformers import PretrainedConfig, ZambaConfig


def zamba(rng: random.Random) -> PretrainedConfig:
    kv_heads = rng.choice([1, 2, 3])
    # transformers fails to share the block of one layer alone.
    types = ["hybrid", "hybrid", *["mamba"] * rng.randint(0, 2)]
    num_layers = len(types) + 1
    return ZambaConfig(
        # Without the tie of the embedding, transformers does not share the block either.
        **trunk(rng, num_layers) | {"tie_word_embeddings": True},
        hidden_size=rng.choice([24, 36]),
        layers_block_type=["linear_attention", *rng.sample(types, len(types))],
        num_attention_heads=kv_heads * rng.choice([1, 2]),
        num_key_value_heads=kv_heads,
        attention_head_dim=rng.choice([None, 4, 10]),
        intermediate_size=rng.choice([16, 25]),
        n_mamba_heads=rng.choice([1, 2, 3]),
        mamba_d_state=rng.choice([4, 12, 16]),
        mamba_d_conv=rng.choice([2, 3, 4]),
        mamba_dt_rank=rng.choice(["auto", 5]),
        mamba_conv_bias=rng.random() < 0.5,
        mamba_proj_bias=rng.random() < 0.5,
    )
