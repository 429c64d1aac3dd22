from __future__ import annotations

import random

from tests.model.families.shapes import grouped_heads, pattern, sizes, trunk
from transformers import NemotronHConfig, PretrainedConfig

PARTS = ["linear_attention", "full_attention", "mlp", "moe"]


def nemotron_h(rng: random.Random) -> PretrainedConfig:
    num_layers = rng.randint(3, 7)
    heads, least_step = rng.choice([3, 5, 6]), rng.choice([0.001, 0.1])
    common = trunk(rng, num_layers) | {"tie_word_embeddings": False}
    common["layer_norm_epsilon"] = common.pop("rms_norm_eps")
    common.pop("num_hidden_layers")
    return NemotronHConfig(
        **common,
        **grouped_heads(rng),
        layers_block_type=pattern(rng, num_layers, PARTS),
        **sizes(rng),
        mlp_bias=rng.random() < 0.5,
        mamba_num_heads=heads,
        mamba_head_dim=rng.choice([8, 16]),
        n_groups=rng.choice([1, heads]),
        ssm_state_size=rng.choice([4, 12, 16]),
        n_routed_experts=6,
        num_experts_per_tok=rng.choice([1, 2, 3]),
        n_group=(groups := rng.choice([1, 2, 3])),
        topk_group=rng.choice([2, groups]) if groups > 1 else 1,
        norm_topk_prob=rng.random() < 0.5,
        routed_scaling_factor=rng.choice([1.0, 2.5]),
        moe_intermediate_size=rng.choice([16, 24]),
        moe_shared_expert_intermediate_size=rng.choice([16, 40]),
        moe_latent_size=rng.choice([None, 12]),
        conv_kernel=rng.choice([2, 3, 4]),
        chunk_size=16,
        use_conv_bias=rng.random() < 0.5,
        use_bias=rng.random() < 0.5,
        # transformers reads the first, the published code and Ferryman the second
        time_step_min=least_step,
        time_step_limit=(least_step, float("inf")),
    )
