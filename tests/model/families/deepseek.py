from __future__ import annotations

import random
from typing import Any

from tests.model.families.shapes import MAX_POSITIONS, trunk
from transformers import DeepseekV2Config, DeepseekV3Config, DeepseekV32Config, PretrainedConfig


def deepseek_v2(rng: random.Random) -> PretrainedConfig:
    fields = deepseek_fields(rng)
    # transformers asks for a hidden size that the heads divide, though nothing depends on it.
    fields["hidden_size"] = fields["num_attention_heads"] * rng.choice([8, 16])
    # transformers rotates pairs as complex numbers, which have to lie at even places.
    fields |= {"kv_lora_rank": rng.choice([6, 8, 24]), "qk_nope_head_dim": rng.choice([4, 8])}
    return DeepseekV2Config(
        **{**fields, "norm_topk_prob": False},
        q_lora_rank=rng.choice([None, 6, 20]),
        topk_method=rng.choice(["greedy", "group_limited_greedy"]),
    )


def deepseek_v3(rng: random.Random) -> PretrainedConfig:
    return DeepseekV3Config(
        **deepseek_fields(rng),
        q_lora_rank=rng.choice([None, 6, 20]),
        rope_interleave=rng.random() < 0.5,
    )


def deepseek_v32(rng: random.Random) -> PretrainedConfig:
    """The index chooses few, most or all of a prompt's positions."""
    return DeepseekV32Config(
        **deepseek_fields(rng),
        q_lora_rank=rng.choice([6, 20]),
        index_n_heads=rng.choice([1, 3, 8]),
        index_head_dim=rng.choice([6, 12]),
        index_topk=rng.choice([1, 5, 16, 40, 200]),
    )


def deepseek_fields(rng: random.Random) -> dict[str, Any]:
    """The common fields: odd numbers of heads, groups of experts; no, some or all layers dense."""
    num_layers, q_heads = rng.randint(1, 4), rng.choice([1, 2, 3, 5])
    num_groups, per_group = rng.choice([1, 2, 3]), rng.choice([2, 3])
    groups_per_token = rng.randint(1, num_groups)
    return {
        **trunk(rng, num_layers),
        "hidden_size": rng.choice([24, 40, 64]),
        "intermediate_size": rng.choice([32, 56]),
        "moe_intermediate_size": rng.choice([8, 24]),
        "num_attention_heads": q_heads,
        "num_key_value_heads": q_heads,
        "kv_lora_rank": rng.choice([5, 8, 24]),
        "qk_nope_head_dim": rng.choice([3, 8]),
        "qk_rope_head_dim": rng.choice([2, 4, 6]),
        "v_head_dim": rng.choice([3, 8]),
        "n_routed_experts": num_groups * per_group,
        "n_shared_experts": rng.choice([1, 2]),
        "n_group": num_groups,
        "topk_group": groups_per_token,
        "num_experts_per_tok": rng.randint(1, groups_per_token * per_group),
        "norm_topk_prob": rng.random() < 0.5,
        "routed_scaling_factor": rng.uniform(0.5, 2.5),
        "first_k_dense_replace": rng.randint(0, num_layers),
        "attention_bias": rng.random() < 0.5,
        "rope_parameters": rng.choice([_default(rng), _yarn(rng)]),
    }


def _default(rng: random.Random) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": rng.choice([1e2, 1e4])}


def _yarn(rng: random.Random) -> dict[str, Any]:
    """YaRN as in DeepSeek's own configs: scores grow by mscale_all_dim."""
    factor = rng.choice([4.0, 40.0])
    return {
        "rope_type": "yarn",
        "rope_theta": rng.choice([1e2, 1e4]),
        "factor": factor,
        "original_max_position_embeddings": int(MAX_POSITIONS / factor),
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": rng.choice([0.7, 1.0]),
        "mscale_all_dim": rng.choice([0.0, 1.0]),
    }
