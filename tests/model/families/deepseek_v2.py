from __future__ import annotations

import random

from tests.model.families.deepseek_shapes import deepseek
from transformers import DeepseekV2Config, PretrainedConfig


def random_config(rng: random.Random) -> PretrainedConfig:
    fields = deepseek(rng)
    # transformers asks for a hidden size that the heads divide, though nothing depends on it.
    fields["hidden_size"] = fields["num_attention_heads"] * rng.choice([8, 16])
    # transformers rotates pairs as complex numbers, which have to lie at even places.
    fields |= {"kv_lora_rank": rng.choice([6, 8, 24]), "qk_nope_head_dim": rng.choice([4, 8])}
    return DeepseekV2Config(
        **{**fields, "norm_topk_prob": False},
        q_lora_rank=rng.choice([None, 6, 20]),
        topk_method=rng.choice(["greedy", "group_limited_greedy"]),
    )
