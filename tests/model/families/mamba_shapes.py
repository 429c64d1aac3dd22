"""The common fields of the configs of Bamba and Granite."""

from __future__ import annotations

import random
from typing import Any


def mamba(rng: random.Random) -> dict[str, Any]:
    """An odd number of state heads in one group or in as many groups as heads."""
    heads, head_dim = rng.choice([(3, 16), (5, 8), (6, 8), (8, 16)])
    return {
        "hidden_size": heads * head_dim // 2,
        "mamba_n_heads": heads,
        "mamba_d_head": head_dim,
        "mamba_n_groups": rng.choice([1, heads]),
        "mamba_d_state": rng.choice([4, 12, 16]),
        "mamba_d_conv": rng.choice([2, 3, 4]),
        "mamba_expand": 2,
        "mamba_chunk_size": 16,
        "mamba_conv_bias": rng.random() < 0.5,
        "mamba_proj_bias": rng.random() < 0.5,
    }
