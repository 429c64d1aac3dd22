from __future__ import annotations

import random

from tests.model.families.shapes import VOCAB_SIZE
from transformers import PretrainedConfig, xLSTMConfig


def xlstm(rng: random.Random) -> PretrainedConfig:
    """Odd numbers of heads, rows and columns; heads of two numbers would have norms that magnify
    roundings without bound."""
    heads, head_dim = rng.choice([(1, 24), (2, 20), (3, 16), (5, 8)])
    num_layers = rng.randint(1, 4)
    return xLSTMConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=heads * head_dim,
        num_hidden_layers=num_layers,
        num_heads=heads,
        qk_dim_factor=rng.choice([0.25, 0.5, 1.0]),
        v_dim_factor=rng.choice([1.0, 1.5]),
        ffn_proj_factor=rng.choice([1.3, 2.667]),
        ffn_round_up_to_multiple_of=rng.choice([1, 8]),
        gate_soft_cap=rng.choice([3.0, 15.0]),
        output_logit_soft_cap=rng.choice([3.0, 30.0]),
        norm_eps=rng.choice([1e-6, 1e-3]),
        eps=rng.choice([1e-6, 1e-2]),
        chunk_size=rng.choice([16, 64]),
        pad_token_id=None,
        bos_token_id=1,
        eos_token_id=2,
    )
