from __future__ import annotations

import random

from tests.model.families.deepseek import deepseek_fields
from transformers import (
    AutoModelForCausalLM,
    Mistral4Config,
    Mistral4ForCausalLM,
    PretrainedConfig,
)

# transformers lists it among models with images alone.
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)


def mistral4(rng: random.Random) -> PretrainedConfig:
    """Queries of most models grow, by lengths so short that a prompt has several."""
    fields = deepseek_fields(rng)
    growth = {
        # Without a scaling transformers takes a whole head for the part that turns.
        "rope_type": "yarn",
        "factor": rng.choice([4.0, 40.0]),
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": rng.choice([0.7, 1.0]),
        "mscale_all_dim": rng.choice([0.0, 1.0]),
        "llama_4_scaling_beta": rng.choice([0.0, 0.1, 0.7]),
        "original_max_position_embeddings": rng.choice([16, 40]),
    }
    return Mistral4Config(
        **{**fields, "rope_parameters": {**fields["rope_parameters"], **growth}},
        q_lora_rank=rng.choice([None, 6, 20]),
        rope_interleave=rng.random() < 0.5,
    )
