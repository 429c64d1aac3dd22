from __future__ import annotations

import random
from typing import Any

from tests.model.families.deepseek_shapes import deepseek
from transformers import GlmMoeDsaConfig, PretrainedConfig


def random_config(rng: random.Random) -> PretrainedConfig:
    """The index chooses few, most or all of a prompt's positions."""
    fields = deepseek(rng)
    index_dim = rng.choice([6, 12])
    return GlmMoeDsaConfig(
        **fields,
        q_lora_rank=rng.choice([6, 20]),
        index_n_heads=rng.choice([1, 3, 8]),
        index_head_dim=max(index_dim, fields["qk_rope_head_dim"]),
        index_topk=rng.choice([1, 5, 16, 40, 200]),
        **_shared(rng, fields["num_hidden_layers"]),
    )


def _shared(rng: random.Random, num_layers: int) -> dict[str, Any]:
    """Layers that share an indexer, by a list, a pattern or a period; often none do."""
    others = rng.choices("FS", k=num_layers - 1)
    pattern = "".join(["F", *others])
    words = ["full" if letter == "F" else "shared" for letter in pattern]
    period = {"index_topk_freq": rng.choice([2, 3]), "index_skip_topk_offset": 1}
    choices: list[dict[str, Any]] = [
        {},
        {"indexer_types": words},
        {"index_topk_pattern": pattern},
        period,
    ]
    return rng.choice(choices)
