from __future__ import annotations

import random
from typing import Any

from tests.model.families.deepseek import deepseek_fields
from transformers import MiniCPM3Config, PretrainedConfig, YoutuConfig

OF_EXPERTS = frozenset(
    """
    first_k_dense_replace moe_intermediate_size n_group n_routed_experts n_shared_experts
    norm_topk_prob num_experts_per_tok routed_scaling_factor topk_group
    """.split()
)


def youtu(rng: random.Random) -> PretrainedConfig:
    return YoutuConfig(
        **_fields(rng),
        q_lora_rank=rng.choice([None, 6, 20]),
        rope_interleave=rng.random() < 0.5,
    )


def minicpm3(rng: random.Random) -> PretrainedConfig:
    fields = _fields(rng)
    # transformers asks for a hidden size that the heads divide, though nothing depends on it.
    fields["hidden_size"] = fields["num_attention_heads"] * rng.choice([8, 16])
    return MiniCPM3Config(
        **fields,
        mlp_bias=rng.random() < 0.5,
        q_lora_rank=rng.choice([None, 6, 20]),
        scale_emb=rng.choice([1, 12]),
        scale_depth=rng.choice([0.7, 1.4]),
        dim_model_base=rng.choice([8, 17]),
    )


def _fields(rng: random.Random) -> dict[str, Any]:
    return {name: value for name, value in deepseek_fields(rng).items() if name not in OF_EXPERTS}
