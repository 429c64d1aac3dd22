from __future__ import annotations

import random

from tests.model.families.deepseek import deepseek_fields
from transformers import HYV4Config, PretrainedConfig

HALVES = {"rope_interleave": False, "indexer_rope_interleave": False}
"""The channels that transformers turns. It ignores these fields, and writes them."""


def hy_v4(rng: random.Random) -> PretrainedConfig:
    """One to four streams; indexers that are shared or not, and choose few or all positions; limits
    that cut many channels of experts or none."""
    fields = deepseek_fields(rng)
    num_layers = fields["num_hidden_layers"]
    words = ["full", "shared"]
    index_dim = fields["qk_rope_head_dim"] + rng.choice([0, 2, 6])
    return HYV4Config(
        **fields,
        q_lora_rank=rng.choice([6, 20]),
        index_n_heads=rng.choice([1, 3, 8]),
        index_head_dim=index_dim,
        index_topk=rng.choice([1, 5, 16, 40, 200]),
        indexer_types=["full", *(rng.choice(words) for _ in range(num_layers - 1))],
        mlp_layer_types=[rng.choice(["dense", "sparse"]) for _ in range(num_layers)],
        hc_mult=rng.randint(1, 4),
        hc_magnitude=rng.choice([0.5, 2.0]),
        hc_eps=rng.choice([1e-6, 1e-2]),
        swiglu_limit=rng.choice([0.05, 0.5, 10.0]),
        **HALVES,
    )
