from __future__ import annotations

import random

from tests.model.families.shapes import (
    LAYER_TYPES,
    VOCAB_SIZE,
    grouped_heads,
    nested_rope,
    pattern,
    trunk,
    window_len,
)
from transformers import Gemma3nTextConfig, PretrainedConfig


def gemma3n(rng: random.Random) -> PretrainedConfig:
    """Layers that share pages, sparse MLPs of several widths, one to four streams."""
    num_layers, heads = rng.randint(2, 6), grouped_heads(rng)
    num_streams = rng.randint(1, 4)
    types, num_own = pattern(rng, num_layers, LAYER_TYPES), rng.randint(1, num_layers)
    is_shared = set(types[:num_own]) == set(types)
    heads["head_dim"] = rng.choice([4, 6])  # scores of longer heads are not divided by their length
    return Gemma3nTextConfig(
        **trunk(rng, num_layers),
        **heads,
        hidden_size=heads["num_attention_heads"] * rng.choice([4, 6]),
        intermediate_size=rng.choice([32, rng.choices([24, 56], k=num_layers)]),
        attention_bias=rng.random() < 0.3,
        num_kv_shared_layers=num_layers - num_own if is_shared else 0,
        hidden_size_per_layer_input=6,
        vocab_size_per_layer_input=rng.choice([VOCAB_SIZE, VOCAB_SIZE - 9]),
        altup_num_inputs=num_streams,
        altup_active_idx=rng.randrange(num_streams),
        altup_correct_scale=rng.random() < 0.7,
        laurel_rank=rng.choice([3, 8]),
        activation_sparsity_pattern=rng.choices([0.0, 0.3, 0.6], k=num_layers),
        final_logit_softcapping=rng.choice([2.0, 30.0]),
        sliding_window=window_len(rng),
        layer_types=types,
        rope_parameters={word: nested_rope(rng) for word in LAYER_TYPES},
    )
