from __future__ import annotations

import random

from tests.model.families.shapes import (
    LAYER_TYPES,
    MLP_TYPES,
    grouped_heads,
    pattern,
    rope,
    trunk,
    window_len,
)
from transformers import Cohere2Config, Cohere2MoeConfig, CohereConfig, PretrainedConfig


def cohere(rng: random.Random) -> PretrainedConfig:
    heads = grouped_heads(rng)
    head_dim = heads.pop("head_dim")
    fields = trunk(rng, rng.randint(1, 4))
    fields["layer_norm_eps"] = fields.pop("rms_norm_eps")
    return CohereConfig(
        **fields,
        **heads,
        hidden_size=heads["num_attention_heads"] * head_dim,
        intermediate_size=rng.choice([32, 56]),
        attention_bias=rng.random() < 0.5,
        use_qk_norm=rng.random() < 0.5,
        logit_scale=rng.uniform(0.05, 1.0),
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


def cohere2_moe(rng: random.Random) -> PretrainedConfig:
    num_layers, num_experts = rng.randint(1, 5), rng.choice([3, 5])
    fields = trunk(rng, num_layers)
    fields["layer_norm_eps"] = fields.pop("rms_norm_eps")
    return Cohere2MoeConfig(
        **fields,
        **grouped_heads(rng),
        hidden_size=rng.choice([24, 40]),
        intermediate_size=rng.choice([16, 28]),
        attention_bias=rng.random() < 0.5,
        logit_scale=rng.uniform(0.05, 1.0),
        num_experts=num_experts,
        num_experts_per_tok=rng.randint(1, num_experts),
        num_shared_experts=rng.choice([0, 1, 2]),
        shared_expert_combination_strategy=rng.choice(["average", "sum"]),
        expert_selection_fn=rng.choice(["softmax", "sigmoid"]),
        norm_topk_prob=rng.random() < 0.5,
        first_k_dense_replace=rng.randint(0, num_layers),
        prefix_dense_intermediate_size=rng.choice([None, 20]),
        prefix_dense_sliding_window_pattern=rng.choice([1, 2]),
        sliding_window_pattern=rng.choice([2, 4]),
        sliding_window=window_len(rng),
        layer_types=rng.choice([None, pattern(rng, num_layers, LAYER_TYPES)]),
        mlp_layer_types=rng.choice([None, pattern(rng, num_layers, MLP_TYPES)]),
        rope_parameters=rope(rng),
    )
