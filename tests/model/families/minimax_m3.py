from __future__ import annotations

import random

from tests.model.families.shapes import MLP_TYPES, pattern, rope, trunk
from transformers import PretrainedConfig
from transformers.models.minimax_m3_vl import MiniMaxM3VLTextConfig

LAYER_TYPES = ["minimax_m3_sparse", "full_attention"]


def minimax_m3(rng: random.Random) -> PretrainedConfig:
    """The index chooses one, few or all of a prompt's blocks, whose length pages divide or not."""
    num_layers, num_experts = rng.randint(1, 4), rng.choice([3, 5])
    kv_heads, rotary_dim, head_dim = rng.choice([1, 2, 3]), rng.choice([4, 8]), rng.choice([8, 16])
    count = rng.choice([1, 2, 3, 8, 200])
    return MiniMaxM3VLTextConfig(
        **trunk(rng, num_layers),
        num_attention_heads=kv_heads * rng.choice([1, 2, 3]),
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        hidden_size=rng.choice([24, 40]),
        intermediate_size=rng.choice([8, 20]),
        dense_intermediate_size=rng.choice([16, 33]),
        shared_intermediate_size=rng.choice([8, 24]),
        num_local_experts=num_experts,
        num_experts_per_tok=rng.randint(1, num_experts),
        routed_scaling_factor=rng.uniform(0.5, 2.5),
        swiglu_alpha=rng.choice([1.0, 1.702]),
        swiglu_limit=rng.choice([0.3, 1.0, 7.0]),
        mlp_layer_types=pattern(rng, num_layers, MLP_TYPES),
        layer_types=pattern(rng, num_layers, LAYER_TYPES),
        index_n_heads=kv_heads,
        index_head_dim=rng.choice([8, 12, 24]),
        index_block_size=rng.choice([3, 4, 8, 16]),
        index_topk_blocks=count,
        index_local_blocks=rng.randint(0, min(count, 3)),
        rope_parameters={**rope(rng), "partial_rotary_factor": rotary_dim / head_dim},
    )
