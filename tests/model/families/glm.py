from __future__ import annotations

import random
from typing import Any

from tests.model.families.deepseek import deepseek_fields
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
    Dots1Config,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmConfig,
    GlmMoeDsaConfig,
    PretrainedConfig,
    SolarOpenConfig,
)


def glm(rng: random.Random) -> PretrainedConfig:
    return GlmConfig(**_dense(rng))


def glm4(rng: random.Random) -> PretrainedConfig:
    return Glm4Config(**_dense(rng))


def _dense(rng: random.Random) -> dict[str, Any]:
    return {
        **trunk(rng, rng.randint(1, 4)),
        **grouped_heads(rng),
        "head_dim": rng.choice([4, 8, 16]),
        **sizes(rng),
        "attention_bias": rng.random() < 0.5,
        "rope_parameters": {**rope(rng), "partial_rotary_factor": rng.choice([0.5, 1.0])},
    }


def solar_open(rng: random.Random) -> PretrainedConfig:
    num_groups, per_group = rng.choice([1, 2]), rng.choice([2, 3])
    groups_per_token = rng.randint(1, num_groups)
    return SolarOpenConfig(
        **trunk(rng, rng.randint(1, 4)),
        **grouped_heads(rng),
        hidden_size=rng.choice([24, 40]),
        moe_intermediate_size=rng.choice([8, 20]),
        attention_bias=rng.random() < 0.5,
        n_routed_experts=num_groups * per_group,
        n_shared_experts=rng.choice([1, 2]),
        n_group=num_groups,
        topk_group=groups_per_token,
        num_experts_per_tok=rng.randint(1, groups_per_token * per_group),
        norm_topk_prob=rng.random() < 0.5,
        routed_scaling_factor=rng.uniform(0.5, 2.5),
        rope_parameters=rope(rng),
    )


def glm4_moe(rng: random.Random) -> PretrainedConfig:
    num_layers, num_groups, per_group = rng.randint(1, 4), rng.choice([1, 2]), rng.choice([2, 3])
    groups_per_token = rng.randint(1, num_groups)
    waves = {**rope(rng), "partial_rotary_factor": rng.choice([0.5, 1.0])}
    return Glm4MoeConfig(
        **trunk(rng, num_layers),
        **{**grouped_heads(rng), "head_dim": rng.choice([4, 8, 16])},
        **sizes(rng),
        moe_intermediate_size=rng.choice([8, 20]),
        attention_bias=rng.random() < 0.5,
        use_qk_norm=rng.random() < 0.5,
        n_routed_experts=num_groups * per_group,
        n_shared_experts=rng.choice([1, 2]),
        n_group=num_groups,
        topk_group=groups_per_token,
        num_experts_per_tok=rng.randint(1, groups_per_token * per_group),
        norm_topk_prob=rng.random() < 0.5,
        routed_scaling_factor=rng.uniform(0.5, 2.5),
        first_k_dense_replace=rng.randint(0, num_layers),
        rope_parameters=waves,
    )


def dots1(rng: random.Random) -> PretrainedConfig:
    num_layers, num_groups = rng.randint(1, 4), rng.choice([1, 2])
    return Dots1Config(
        **trunk(rng, num_layers),
        **grouped_heads(rng),
        **sizes(rng),
        attention_bias=rng.random() < 0.5,
        moe_intermediate_size=rng.choice([8, 20]),
        n_routed_experts=num_groups * rng.choice([2, 3]),
        n_shared_experts=rng.choice([1, 2]),
        num_experts_per_tok=rng.choice([1, 2]),
        n_group=num_groups,
        topk_group=rng.randint(1, num_groups),
        norm_topk_prob=rng.random() < 0.5,
        routed_scaling_factor=rng.choice([1.0, 2.5]),
        first_k_dense_replace=rng.randint(0, 2),
        sliding_window=window_len(rng),
        max_window_layers=rng.randint(0, num_layers),
        layer_types=rng.choice([None, pattern(rng, num_layers, LAYER_TYPES)]),
        rope_parameters=rope(rng),
    )


def glm4_moe_lite(rng: random.Random) -> PretrainedConfig:
    fields = deepseek_fields(rng)
    del fields["first_k_dense_replace"]
    types = pattern(rng, fields["num_hidden_layers"], ["sparse", "dense"])
    return Glm4MoeLiteConfig(
        **fields,
        q_lora_rank=rng.choice([None, 6, 20]),
        rope_interleave=rng.random() < 0.5,
        mlp_layer_types=rng.choice([None, types]),
    )


def glm_moe_dsa(rng: random.Random) -> PretrainedConfig:
    """The index chooses few, most or all of a prompt's positions."""
    fields = deepseek_fields(rng)
    index_dim = rng.choice([6, 12])
    return GlmMoeDsaConfig(
        **fields,
        q_lora_rank=rng.choice([6, 20]),
        index_n_heads=rng.choice([1, 3, 8]),
        index_head_dim=max(index_dim, fields["qk_rope_head_dim"]),
        index_topk=rng.choice([1, 5, 16, 40, 200]),
        **_shared(rng, fields["num_hidden_layers"]),
    )


def _shared(rng: random.Random, num_layers: int) -> dict[str, Any]:
    """Layers that share an indexer, by a list, a pattern or a period; often none do."""
    others = rng.choices("FS", k=num_layers - 1)
    pattern = "".join(["F", *others])
    words = ["full" if letter == "F" else "shared" for letter in pattern]
    period = {"index_topk_freq": rng.choice([2, 3]), "index_skip_topk_offset": 1}
    choices: list[dict[str, Any]] = [
        {},
        {"indexer_types": words},
        {"index_topk_pattern": pattern},
        period,
    ]
    return rng.choice(choices)
