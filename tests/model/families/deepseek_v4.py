from __future__ import annotations

import random

from tests.model.families.shapes import trunk
from transformers import DeepseekV4Config, PretrainedConfig

CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 256,
}
LAYER_TYPES = ["sliding_attention", CSA, HCA]


def deepseek_v4(rng: random.Random) -> PretrainedConfig:
    """Layers of all types; one to four streams, one round or many; experts by token ids in no, some
    or all layers; limits that cut many channels or none."""
    num_layers, num_experts = rng.randint(1, 4), rng.choice([3, 5])
    groups = rng.choice([1, 2, 3])
    return DeepseekV4Config(
        **trunk(rng, num_layers),
        hidden_size=rng.choice([24, 40]),
        moe_intermediate_size=rng.choice([8, 24]),
        num_attention_heads=groups * rng.choice([1, 2, 3]),
        head_dim=16,
        partial_rotary_factor=rng.choice([0.25, 0.5]),
        q_lora_rank=rng.choice([6, 20]),
        o_groups=groups,
        o_lora_rank=rng.choice([4, 7]),
        sliding_window=rng.choice([1, 3, 16, 40, 200]),
        layer_types=[rng.choice(LAYER_TYPES) for _ in range(num_layers)],
        compress_rates={CSA: rng.choice([2, 4]), HCA: rng.choice([4, 8, 16])},
        index_n_heads=rng.choice([1, 3, 8]),
        index_head_dim=rng.choice([8, 12]),
        index_topk=rng.choice([1, 5, 16, 200]),
        mlp_layer_types=[rng.choice(["hash_moe", "moe"]) for _ in range(num_layers)],
        n_routed_experts=num_experts,
        num_experts_per_tok=rng.randint(1, num_experts),
        routed_scaling_factor=rng.choice([1.0, 1.5]),
        swiglu_limit=rng.choice([0.05, 0.5, 10.0]),
        hc_mult=rng.randint(1, 4),
        hc_sinkhorn_iters=rng.choice([1, 2, 20]),
        hc_eps=rng.choice([1e-6, 1e-2]),
        rope_theta=rng.choice([100.0, 10_000.0]),
        compress_rope_theta=rng.choice([1000.0, 160_000.0]),
        rope_parameters=rng.choice([None, YARN]),
    )
