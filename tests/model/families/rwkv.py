from __future__ import annotations

import random

from tests.model.families.shapes import VOCAB_SIZE
from transformers import PretrainedConfig, RwkvConfig


def rwkv(rng: random.Random) -> PretrainedConfig:
    return RwkvConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=rng.choice([24, 35, 48]),
        num_hidden_layers=rng.randint(2, 5),
        attention_hidden_size=rng.choice([None, 20, 33]),
        intermediate_size=rng.choice([None, 50]),
        layer_norm_epsilon=rng.choice([1e-5, 1e-3]),
        rescale_every=rng.choice([0, 1, 2, 6]),
        tie_word_embeddings=rng.random() < 0.5,
        bos_token_id=1,
        eos_token_id=2,
    )
