"""The common fields of the configs of LFM2 and LFM2-MoE."""

from __future__ import annotations

import random
from typing import Any

from tests.model.families.shapes import grouped_heads, pattern, rope, trunk


def short_convolutions(rng: random.Random, num_layers: int) -> dict[str, Any]:
    sizes, heads = trunk(rng, num_layers), grouped_heads(rng)
    sizes["norm_eps"] = sizes.pop("rms_norm_eps")
    heads.pop("head_dim")
    return {
        **sizes,
        **heads,
        "hidden_size": heads["num_attention_heads"] * rng.choice([4, 6, 16]),
        "layer_types": pattern(rng, num_layers, ["conv", "full_attention"]),
        "rope_parameters": rope(rng),
        "conv_L_cache": rng.choice([2, 3, 4]),
        "conv_bias": rng.random() < 0.5,
    }
