from __future__ import annotations

import random

from tests.model.families.shapes import grouped_heads, rope, trunk
from transformers import GPTNeoXConfig, PretrainedConfig


def gpt_neox(rng: random.Random) -> PretrainedConfig:
    heads, fields = grouped_heads(rng)["num_attention_heads"], trunk(rng, rng.randint(1, 4))
    fields["layer_norm_eps"] = fields.pop("rms_norm_eps")
    waves = {**rope(rng), "partial_rotary_factor": rng.choice([0.25, 0.5, 1.0])}
    return GPTNeoXConfig(
        **fields,
        num_attention_heads=heads,
        hidden_size=heads * rng.choice([8, 16]),
        intermediate_size=rng.choice([32, 56]),
        attention_bias=rng.random() < 0.6,
        use_parallel_residual=rng.random() < 0.6,
        rope_parameters=waves,
    )
