from __future__ import annotations

import random

from tests.model.families.shapes import pattern, rope, trunk
from transformers import PretrainedConfig, Zamba2Config


def zamba2(rng: random.Random) -> PretrainedConfig:
    num_layers, heads = rng.randint(2, 3), rng.choice([2, 3, 6])
    mamba_heads = rng.choice([2, 3, 6])
    least_step = rng.choice([0.001, 0.1])
    turns = rng.random() < 0.5
    return Zamba2Config(
        # Without the tie of the embedding, transformers does not share the blocks either.
        **trunk(rng, num_layers) | {"tie_word_embeddings": True},
        hidden_size=rng.choice([24, 36]),
        layers_block_type=["linear_attention", *pattern(rng, num_layers - 1, ["hybrid", "mamba"])],
        num_attention_heads=heads,
        intermediate_size=rng.choice([None, 16, 25]),
        num_mem_blocks=rng.choice([1, 2]),
        use_shared_attention_adapter=rng.random() < 0.5,
        adapter_rank=rng.choice([3, 8]),
        use_mem_rope=turns,
        rope_parameters=rope(rng) if turns else None,
        add_bias_linear=rng.random() < 0.5,
        n_mamba_heads=mamba_heads,
        mamba_ngroups=rng.choice([1, mamba_heads]),
        mamba_d_state=rng.choice([4, 12, 16]),
        mamba_d_conv=rng.choice([2, 3, 4]),
        chunk_size=16,
        # transformers reads the first, Ferryman the second
        time_step_min=least_step,
        time_step_limit=(least_step, float("inf")),
    )
