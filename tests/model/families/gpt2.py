from __future__ import annotations

import random

from tests.model.families.shapes import trunk
from transformers import GPT2Config, PretrainedConfig


def gpt2(rng: random.Random) -> PretrainedConfig:
    fields, heads = trunk(rng, rng.randint(1, 4)), rng.choice([1, 2, 3, 5])
    fields["layer_norm_epsilon"] = fields.pop("rms_norm_eps")
    return GPT2Config(
        **fields,
        num_attention_heads=heads,
        hidden_size=heads * rng.choice([4, 6, 16]),
        n_inner=rng.choice([None, 32, 41]),
        activation_function=rng.choice(["gelu_new", "gelu_pytorch_tanh"]),
        scale_attn_weights=rng.random() < 0.7,
        scale_attn_by_inverse_layer_idx=rng.random() < 0.5,
    )
